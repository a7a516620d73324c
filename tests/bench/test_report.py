"""The report: what it takes from a folder, what a browser makes of the page, and measuring what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moa_bench.accept.measure import Results
from moa_bench.cli import main
from moa_bench.conversation import Round
from moa_bench.report import runs
from moa_bench.result import RESULT_VERSION, result_of
from moa_runtime.bundle import Fingerprints

TITLE = "moa-edge benchmark report"
ATTACK = "<script>document.title = 'owned'</script>"
PRINTS = Fingerprints("target-1", "tokenizer-1", "drafter-1")


def accept_result(*, task: str = "qa", prints: Fingerprints = PRINTS, **changes: Any) -> dict[str, Any]:
    """What ``moa-bench accept`` writes of two rounds; tau is 2."""
    results = Results(2)
    for tally in results.tallies(task):
        tally.questions += 1
        tally.add(Round(2, 2, 2, 3))
        tally.add(Round(2, 2, 0, 1))
    total = results.total.as_dict()
    sampling = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    settings = {"questions": "questions.jsonl", "draft_length": 2, "max_new_tokens": 9, "sampling": sampling}
    figures = {**total, "tau": results.tau, "tasks": {task: results.tasks[task].as_dict()}, "skipped": []}
    return result_of("accept", figures, settings=settings, fingerprints=prints, seconds=3.0) | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds one good result."""
    place = tmp_path / "results"
    place.mkdir()
    store(place / "accept.json", accept_result())
    return place


def store(path: Path, result: object) -> None:
    path.write_text(json.dumps(result))


@pytest.fixture
def report(folder, capsys):
    """Runs ``moa-bench report`` on the folder: more arguments -> exit status, stdout, stderr."""

    def run(*more: str) -> tuple[int, str, str]:
        status = main(["report", str(folder), *more])
        return status, *capsys.readouterr()

    return run


@dataclass
class Page(HTMLParser):
    """A page's elements with their attributes, and the text inside each kind of element."""

    html: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.html)

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        while self._open and self._open.pop() != tag:  # <meta> and <p> need no end
            pass

    def handle_data(self, data) -> None:
        if data.strip() and self._open:
            self.texts.append((self._open[-1], " ".join(data.split())))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    @property
    def references(self) -> list[str]:
        """What the page might fetch or lead to."""
        names = ("src", "href", "xlink:href", "srcset", "data", "action")
        return [value for _, attributes in self.elements for name in names if (value := attributes.get(name))]


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


# -- in a browser -----------------------------------------------------------------------------------


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page in headless Chromium without a network: page, more options -> stdout."""

    def run(page: Path, *more: str) -> str:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command = [browser, *options, *more, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_browser_shows_headings_tables_and_plots_and_runs_nothing(folder, report, opened):
    hostile = accept_result(task=ATTACK, partial=True, problem=f"stopped by {ATTACK}")
    hostile["settings"]["questions"] = f"{ATTACK}.jsonl"
    hostile["measured_at"] = "2026-01-01T00:00:00+00:00"  # before the other, which it stands above
    store(folder / "<img src=x onerror=alert(1)>.json", hostile)
    assert report()[0] == 0
    page = Page(opened(folder / "report.html", "--dump-dom"))
    assert page.text("title") == [TITLE]
    assert page.text("h2") == ["accept: <img src=x onerror=alert(1)>.json", "accept: accept.json", "origin"]
    assert len(page.all("svg")) == 2
    assert len(page.all("table")) == 2 * 2 + 3
    assert all(cell["scope"] in ("row", "col") for cell in page.all("th"))
    assert not page.all("script") and not page.all("img")
    # As a setting, in the table, and in the plot; once more in the sentence about the problem.
    assert f"{ATTACK}.jsonl" in page.text("dd")
    assert ATTACK in page.text("th") and ATTACK in page.text("text")
    assert f"stopped by {ATTACK}." in page.text("p")


@pytest.mark.parametrize(
    ("scheme", "ground", "bars"),
    [("light", (0xFF, 0xFF, 0xFF), (0x0B, 0x63, 0xCE)), ("dark", (0x0F, 0x13, 0x17), (0x58, 0xA6, 0xFF))],
)
def test_a_screenshot_has_the_plot_in_the_colours_of_its_scheme(folder, report, opened, tmp_path, scheme, ground, bars):
    from matplotlib.image import imread

    report()
    shot = tmp_path / "shot.png"
    preferred = f"--blink-settings=preferredColorScheme={('dark', 'light').index(scheme)}"
    opened(folder / "report.html", preferred, "--window-size=800,1600", f"--screenshot={shot}")
    pixels = np.rint(imread(shot)[..., :3] * 255).astype(int)
    assert pixels.shape[:2] == (1600, 800)
    assert tuple(pixels[0, 0]) == ground
    assert (pixels == bars).all(axis=-1).sum() > 1000  # filled bars, not a line or two
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


# -- the page ---------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_itself_and_its_ids_differ(folder, report):
    store(folder / "again.json", accept_result())
    report()
    page = page_of(folder)
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert page.references and all(reference[0] == "#" for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(identities)
    assert not {"link", "script", "img", "iframe"} & {tag for tag, _ in page.elements}
    styles = [attributes["style"] or "" for _, attributes in page.elements if "style" in attributes]
    outside = [part for text in [*page.text("style"), *styles] for part in text.split("url(")[1:] if part[0] != "#"]
    assert not outside and "@import" not in page.html


def test_settings_figures_and_a_described_plot_are_shown(folder, report):
    report()
    page = page_of(folder)
    headline, *conditions = page.text("dd")
    assert headline == "2.000"
    assert "questions.jsonl" in conditions
    assert "sampling top p" in page.text("dt")
    assert "mean over tasks" in page.text("th")
    assert {"target-1", "tokenizer-1", "drafter-1"} <= set(page.text("td"))
    classes = [cell.get("class") for cell in page.all("th") if cell["scope"] == "col"][:5]
    assert classes == [None, *["number"] * 4]  # task; questions, rounds, tokens, tau
    (plot,) = page.all("svg")
    assert plot["role"] == "img"
    assert plot["aria-label"] == "Plot of accept: tau by task; accepted length; accuracy by depth"
    assert "tokens committed per round" in page.text("text")  # no outlines of letters


def test_names_of_tasks_are_no_formulas(folder, report):
    store(folder / "accept.json", accept_result(task=r"$\frac$"))
    assert report()[0] == 0
    assert r"$\frac$" in page_of(folder).text("text")


def test_a_partial_result_is_marked(folder, report):
    store(folder / "accept.json", accept_result(partial=True, problem="interrupted early"))
    report()
    page = page_of(folder)
    assert "Partial result." in page.text("strong") and "interrupted early." in page.text("p")


def test_results_with_other_fingerprints_or_machines_are_not_comparable(folder, report):
    other = accept_result(prints=Fingerprints("target-1", "tokenizer-1", "drafter-2"))
    other["machine"]["cores"] = 1000
    store(folder / "other.json", other)
    found = json.loads(report("--json")[1])
    assert found["differences"] == ["machine (cores)", "fingerprints (drafter)"]
    page = page_of(folder)
    assert "Not comparable." in page.text("strong")
    assert page.text("em") == ["differs"] * 2
    assert {"drafter-1", "drafter-2"} <= set(page.text("td"))


def test_results_of_other_versions_are_comparable_but_marked(folder, report):
    other = accept_result()
    other["versions"]["numpy"] = "0.1"
    store(folder / "other.json", other)
    assert json.loads(report("--json")[1])["differences"] == []
    page = page_of(folder)
    assert "Not comparable." not in page.text("strong")
    assert page.text("em") == ["differs"]


# -- the folder -------------------------------------------------------------------------------------


def test_results_of_one_benchmark_stand_in_the_order_of_measuring(folder, report):
    store(folder / "accept.json", accept_result(measured_at="2026-01-02T00:00:00+00:00"))
    store(folder / "z.json", accept_result(measured_at="2026-01-01T00:00:00+00:00", tau=3.0))
    status, out, err = report("--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert [(result["file"], result["measured_at"][:10]) for result in found["results"]] == [
        ("z.json", "2026-01-01"),
        ("accept.json", "2026-01-02"),
    ]
    assert found["results"][0]["headlines"]["tokens per round (tau)"] == 3.0
    assert found["page"] == str(folder / "report.html")
    assert (found["left_out"], found["failed"]) == ({}, [])


def test_files_that_are_no_results_are_named_and_the_others_are_shown(folder, report):
    whole = accept_result()
    odd = {
        "a": (b"{", "it is no JSON"),
        "b": (b"\xff", "it is no JSON"),
        "c": (b"[]", "it is no result of moa-bench"),
        "d": (b'{"benchmark": "accept"}', "it is no result of moa-bench"),
        "e": (whole | {"benchmark": "juggling"}, "moa-bench has no benchmark 'juggling'"),
        "f": (whole | {"settings": []}, "it is damaged: 'settings' is missing or of the wrong kind"),
        "g": ({"benchmark": "accept", "version": 1}, "it is damaged: 'partial' is missing or of the wrong kind"),
        "h": (whole | {"tasks": {"qa": {}}}, "it is damaged (KeyError: 'questions')"),
        "i": (whole | {"tasks": None}, "it is damaged (AttributeError: 'NoneType' object has no attribute 'items')"),
    }
    for name, (content, _) in odd.items():
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / f"{name}.json").write_bytes(text)
    status, _, err = report()
    assert status == 0
    assert sorted(err.splitlines()) == [
        f"moa-bench report: {name}.json is left out: {reason}" for name, (_, reason) in odd.items()
    ]
    page = page_of(folder)
    assert page.text("h2") == ["accept", "origin"]
    assert {f"{name}.json: {reason}." for name, (_, reason) in odd.items()} <= set(page.text("p"))


def refusal(report, *more: str) -> str:
    """What a refused command says; it must be one line."""
    status, out, err = report(*more)
    assert (status, out) == (2, "")
    assert err.startswith("moa-bench: error: ") and err.count("\n") == 1
    return err


def test_a_newer_result_is_refused(folder, report):
    store(folder / "new.json", accept_result(version=RESULT_VERSION + 1))
    assert "new.json was written by a newer moa-bench" in refusal(report)


def test_no_results_and_no_folder(folder, report):
    (folder / "accept.json").unlink()
    assert "moa-bench accept --questions FILE --json >" in refusal(report)
    folder.rmdir()
    assert "there is no folder" in refusal(report)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--run"], "--run needs --questions"),
        (["--run", "--questions", "no-such-file", "--limit", "1"], "no-such-file: No such file"),
        (["--limit", "1"], "give --run too"),
        (["--out", "no-such-folder/page.html"], "cannot be written: there is no such file or folder"),
        (["--out", "accept.json"], "--out accept.json: results end with .json, and a page is none"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(report, argv, said):
    assert said in refusal(report, *argv)


def test_the_page_is_written_where_it_is_wanted_as_a_whole_or_not_at_all(folder, report, tmp_path):
    out = tmp_path / "page.html"
    assert report("--out", str(out))[:2] == (0, f"{out}: accept.json\n")
    assert out.read_text().endswith("</html>") and not (folder / "report.html").exists()
    (tmp_path / "taken").mkdir()
    assert "cannot be written: it is a folder" in refusal(report, "--out", str(tmp_path / "taken"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "results", "taken"]


# -- measuring what is missing ----------------------------------------------------------------------


@pytest.fixture
def measuring(folder, tmp_path, monkeypatch):
    """Lets a Python script stand in for ``moa-bench``: benchmarks, script -> arguments for the report."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["Why?"]}))

    def prepare(benchmarks: tuple[str, ...], script: str) -> list[str]:
        monkeypatch.setattr(runs, "BENCHMARKS", benchmarks)
        monkeypatch.setattr(runs, "_PROGRAM", (sys.executable, "-c", script))
        return ["--run", "--questions", str(questions), "--limit", "1"]

    return prepare


def test_a_benchmark_that_fails_is_named_and_the_next_one_runs(folder, report, measuring, tmp_path):
    (folder / "accept.json").rename(tmp_path / "printed")
    script = f"""
import pathlib, sys
if sys.argv[1] == "offline":
    sys.exit("no bundle")
given = ["accept", "--json", "--questions", "{tmp_path / "questions.jsonl"}", "--limit", "1"]
assert sys.argv[1:7] == given, sys.argv
print(pathlib.Path("{tmp_path / "printed"}").read_text())
"""
    arguments = measuring(("offline", "accept"), script)
    status, out, err = report(*arguments, "--json")
    found = json.loads(out)
    assert (status, found["failed"]) == (1, ["offline"])
    assert [result["file"] for result in found["results"]] == ["accept.json"]
    assert "offline left no result" in err
    assert sorted(path.name for path in folder.iterdir()) == ["accept.json", "report.html"]


def test_what_is_there_is_not_measured_again(report, measuring):
    status, out, err = report(*measuring(("accept",), "raise SystemExit('ran')"))
    assert (status, err) == (0, "") and "accept.json" in out


def test_what_is_in_the_way_of_a_result_is_not_overwritten(folder, report, measuring):
    (folder / "accept.json").write_text("precious")
    assert "accept.json is in the way" in refusal(report, *measuring(("accept",), ""))
    assert (folder / "accept.json").read_text() == "precious"


def test_an_interruption_stops_the_benchmark_that_runs(folder, report, measuring, monkeypatch, tmp_path):
    (folder / "accept.json").unlink()
    script = f"""
import pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
print("ready", flush=True)
signal.sigwait({{signal.SIGINT}})
pathlib.Path("{tmp_path / "told"}").touch()
print("{{}}")
"""
    communicate = subprocess.Popen.communicate

    def interrupted(process):
        assert process.stdout.readline() == "ready\n"
        monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    status, out, err = report(*measuring(("accept", "offline"), script))
    assert (status, out) == (130, "") and "interrupted" in err
    assert (tmp_path / "told").exists()
    assert list(folder.iterdir()) == []
