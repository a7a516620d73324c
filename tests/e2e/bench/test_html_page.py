"""``--html``: what a browser makes of the page, and that nothing in a result is taken as markup."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moa_bench.accept import Accept, Results
from moa_bench.cli import main
from moa_bench.harness import Round
from moa_bench.html_page import flat, render
from moa_bench.result import result_of
from moa_runtime.manifest import Fingerprints

ATTACK = "<script>document.title = 'owned'</script>"


def accept_result(*, task: str = "qa", **changes: Any) -> dict[str, Any]:
    """What ``moa-bench accept`` writes of two rounds; tau is 2."""
    results = Results(2, rounds={task: [Round(2, 2, 2, 3), Round(2, 2, 0, 1)]}, questions=Counter({task: 1}))
    sampling = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    settings = {"questions": "questions.jsonl", "draft_length": 2, "max_new_tokens": 9, "sampling": sampling}
    prints = Fingerprints("target-1", "tokenizer-1", "drafter-1")
    figures = {**results.as_dict(), "skipped": []}
    return result_of("accept", figures, settings=settings, fingerprints=prints, seconds=3.0) | changes


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


def page_of(result: dict[str, Any]) -> Page:
    return Page(render(Accept(), json.loads(json.dumps(result))))


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


def test_a_browser_shows_headings_tables_and_the_plot_and_runs_nothing(opened, tmp_path):
    hostile = accept_result(task=ATTACK, partial=True, problem=f"stopped by {ATTACK}")
    hostile["settings"]["questions"] = f"{ATTACK}.jsonl"
    path = tmp_path / "page.html"
    path.write_text(render(Accept(), hostile), encoding="utf-8")
    page = Page(opened(path, "--dump-dom"))
    assert page.text("title") == ["moa-bench accept"]
    assert page.text("h2") == ["settings", "machine", "versions", "fingerprints"]
    assert len(page.all("svg")) == 1 and len(page.all("table")) == 2
    assert all(cell["scope"] in ("row", "col") for cell in page.all("th"))
    assert not page.all("script") and not page.all("img")
    # As a setting, in the table, and in the plot; once more in the sentence about the problem.
    assert f"{ATTACK}.jsonl" in page.text("dd")
    assert ATTACK in page.text("th") and ATTACK in page.text("text")
    assert f"stopped by {ATTACK}." in page.text("p")


# -- the page ---------------------------------------------------------------------------------------


def test_the_page_refers_to_nothing_outside_itself_and_its_ids_differ():
    page = page_of(accept_result())
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert page.references and all(reference[0] == "#" for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(identities)
    assert not {"link", "script", "img", "iframe"} & {tag for tag, _ in page.elements}
    styles = [attributes["style"] or "" for _, attributes in page.elements if "style" in attributes]
    outside = [part for text in [*page.text("style"), *styles] for part in text.split("url(")[1:] if part[0] != "#"]
    assert not outside and "@import" not in page.html


def test_settings_figures_and_a_described_plot_are_shown():
    page = page_of(accept_result())
    values = page.text("dd")
    assert {"questions.jsonl", "target-1", "tokenizer-1", "drafter-1"} <= set(values)
    assert "sampling top p" in page.text("dt")
    assert {row[0] for row in Accept().tables(accept_result())[0].rows} <= set(page.text("th"))
    classes = [cell.get("class") for cell in page.all("th") if cell["scope"] == "col"][:5]
    assert classes == [None, *["number"] * 4]  # task; questions, rounds, tokens, tau
    (plot,) = page.all("svg")
    assert plot["role"] == "img"
    assert plot["aria-label"] == "Plot of accept: tau by task; accepted length; accuracy by depth"
    assert {"qa", "2.00"} <= set(page.text("text"))  # no outlines of letters


def test_names_of_tasks_are_no_formulas_and_a_partial_result_is_marked():
    page = page_of(accept_result(task=r"$\frac$", partial=True, problem="interrupted early"))
    assert r"$\frac$" in page.text("text")
    assert page.text("strong") and "interrupted early." in page.text("p")


def test_values_are_shown_as_they_were_given():
    settings = {"memory_gib": 7.5, "limit": None, "modes": ["a", "b"], "ngrams": True, "sampling": {"top_p": 1.0}}
    rows = [("memory GiB", "7.5"), ("limit", "-"), ("modes", "a, b"), ("ngrams", "yes"), ("sampling top p", "1")]
    assert flat(settings) == rows


def test_every_command_writes_the_page(tiny, questions, tmp_path):
    target, drafter, bundle, *_ = tiny
    page = tmp_path / "page.html"
    named = questions.rename(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    where = ["--questions", named, "--bundle", bundle, "--model", target, "--drafter", drafter, "--limit", "1"]
    words = ["offline", *where, "--after", "4", "--lengths", "4", "--html", page]
    assert main(list(map(str, words))) == 0
    shown = Page(page.read_text(encoding="utf-8"))
    assert shown.text("h1") == ["moa-bench offline"] and len(shown.all("svg")) == 1
    assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
