"""Programs beside the window, and the measurement of the window itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

import typist
from measure_window import measure_answer
from moa_chat import strings
from moa_chat.desktop import programs
from moa_chat.desktop.programs import BundleExport, Program, VerifierProcess
from moa_export.progress import JsonProgress
from support.chat.desktop.window_driving import TOKEN, is_online


@pytest.fixture
def run(until):
    """Runs a script as a program, and returns its objects and how it ended."""

    def run_script(script: str, environment: dict[str, str] | None = None) -> tuple[list[dict], object]:
        program = Program([sys.executable, "-c", script], environment or {})
        said: list[dict] = []
        ended: list[object] = []
        program.said.connect(said.append)
        program.ended.connect(ended.append)
        program.start()
        until(lambda: ended)
        return said, ended[0]

    return run_script


def test_a_program_says_objects_among_other_lines_and_why_it_failed(run):
    script = "import os; print('noise'); print('{\"a\": ' + os.environ['A'] + '}'); print('[1]')"
    assert run(script, {"A": "5"}) == ([{"a": 5}], None)
    script = "import sys; print('loud', file=sys.stderr); sys.exit('moa-serve: error: no room  [disk_full]')"
    _, error = run(script)
    assert (str(error), error.code) == ("no room", "disk_full")
    assert str(run("import sys; sys.exit(3)")[1]).endswith(" 3")


def test_a_program_that_is_not_there_is_an_error(qtbot):
    program = Program(["/nonexistent/program"], {})
    with qtbot.waitSignal(program.ended) as ended:
        program.start()
    assert ended.args[0].code == "not_started" and "/nonexistent/program" in str(ended.args[0])


def test_a_stopped_program_is_gone_and_silent(until):
    program = Program([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(600)"], {})
    said, ended = [], []
    program.said.connect(said.append)
    program.ended.connect(ended.append)
    program.start()
    until(lambda: said)
    program.stop()
    assert not program.running and ended == []


@pytest.fixture
def instead(monkeypatch):
    """Runs a script in the place of moa-edge's own programs."""

    def run_instead(script: str) -> None:
        monkeypatch.setattr(programs, "own_program", lambda *_: [sys.executable, "-c", script])
        monkeypatch.setattr(programs, "require_extra", lambda *_: None)

    return run_instead


def test_the_window_connects_to_a_verifier_of_this_machine(open_window, verifier, instead, monkeypatch, until):
    """Its process says where it is, and gets a token."""
    url = json.dumps({"url": f"ws://127.0.0.1:{verifier.port}"})
    instead(f"import os, time; assert os.environ['MOA_TOKEN']; print('{url}', flush=True); time.sleep(600)")
    monkeypatch.setattr(programs.secrets, "token_urlsafe", lambda _: TOKEN)
    window = open_window(local=True)
    until(lambda: is_online(window))


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_window_leaves_no_verifier(tmp_path, until):
    """The verifier ends with its standard input, and that ends with the window."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    verifier = (
        "import pathlib, sys; assert '--until-stdin-ends' in sys.argv\n"
        f"pathlib.Path({str(begun)!r}).touch(); sys.stdin.read(); pathlib.Path({str(ended)!r}).touch()"
    )
    window = (
        "import sys; from PySide6.QtCore import QCoreApplication; from moa_chat.desktop import programs\n"
        f"programs.own_program = lambda module, *rest: [sys.executable, '-c', {verifier!r}, *rest]\n"
        "application = QCoreApplication([]); verifier = programs.VerifierProcess()\n"
        "verifier.start(); application.exec()"
    )
    with subprocess.Popen([sys.executable, "-c", window]) as process:
        until(begun.exists)
        assert not ended.exists()
        process.kill()
    until(ended.exists)


def test_a_verifier_that_does_not_start_is_a_sentence(open_window, instead, until):
    instead("import sys; sys.exit('moa-serve: error: NO TARGET')")
    window = open_window(local=True)
    until(lambda: "NO TARGET." in window.page.notice.text)


@pytest.mark.parametrize("first", [False, True], ids=["later", "first run"])
def test_the_start_of_a_verifier_is_shown_and_can_be_given_up(open_window, instead, tmp_path, until, first):
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    instead(
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(ended)!r}).touch(); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    )
    window = open_window(local=not first)
    page, welcome = window.page, window.first_run
    if first:
        welcome.form.local.setChecked(True)
        welcome.start.click()
        until(begun.exists)
        assert welcome.progress.text.startswith(strings.STARTING_FIRST) and not welcome.start.isVisible()
        until(lambda: welcome.progress.text != strings.SECONDS.format(strings.STARTING_FIRST, 0))
        welcome.progress.button.click()
        assert welcome.form.state.objectName() == "problem" and welcome.start.isVisible()
        assert not welcome.progress.isVisible()
    else:
        until(begun.exists)
        assert page.progress.isVisible() and page.progress.text.startswith(strings.STARTING)
        assert strings.STARTING_FIRST not in page.progress.text
        until(lambda: page.progress.text != strings.SECONDS.format(strings.STARTING, 0))
        page.progress.button.click()
        assert not page.progress.isVisible() and page.notice.button.text() == strings.TRY_AGAIN
        page.notice.button.click()
        assert page.progress.isVisible()
    until(ended.exists)


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr("moa_runtime.optional_deps.importlib.util.find_spec", lambda name: None)
    for starts in (VerifierProcess().start, BundleExport().start):
        with pytest.raises(Exception, match="pip install"):
            starts()


def test_a_window_of_a_named_drafter_has_its_bundle_and_verifier(monkeypatch, tmp_path, qtbot):
    monkeypatch.setenv("MOA_EDGE_CACHE", str(tmp_path))
    monkeypatch.setattr(programs, "require_extra", lambda *_: None)
    commands: list[tuple[str, ...]] = []

    def command(*words: str) -> list[str]:
        commands.append(words)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(programs, "own_program", command)
    export, verifier = BundleExport("early-exit"), VerifierProcess("early-exit")
    with qtbot.waitSignals([export.ended, verifier.failed], timeout=60_000):
        export.start()
        verifier.start()
    folder = tmp_path / "bundles" / "early-exit"
    assert export.folder == folder and commands[0][1:] == (str(folder), "--json", "--drafter", "early-exit")
    assert commands[1][-2:] == ("--drafter", "early-exit") and not export.present
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert export.present


@pytest.mark.parametrize("first", [False, True], ids=["later", "first run"])
def test_a_bundle_that_is_missing_is_made_before_the_verifier_starts(
    open_window, instead, until, monkeypatch, tmp_path, first
):
    """In one step, which shows its progress and can be given up."""
    bundle, go = tmp_path / "default", tmp_path / "go"
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(bundle))
    instead(
        "import json, pathlib, time; print(json.dumps({'stage': 'comparing', 'part': 0.25}), flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        f"bundle = pathlib.Path({str(bundle)!r}); bundle.mkdir(); (bundle / 'manifest.json').touch()"
    )
    window = open_window(bundle="", local=not first)
    welcome, page = window.first_run, window.page
    if first:
        assert welcome.form.bundle.state.text() == strings.BUNDLE_MISSING
        assert welcome.form.server.isVisible() and not welcome.form.token.isVisible(), "an address is enough"
        welcome.form.local.setChecked(True)
        welcome.start.click()
    progress = welcome.progress if first else page.progress
    until(lambda: progress.text.startswith(strings.PREPARING.format("comparing")))
    assert progress.bar.value() == 25
    progress.button.click()
    assert not window.connector.export.running and not progress.isVisible()
    (welcome.start if first else page.notice.button).click()
    until(lambda: progress.text.startswith(strings.PREPARING.format("comparing")))
    instead("import sys; sys.exit('moa-serve: error: NO TARGET')")
    go.touch()
    said = welcome.form.state if first else page.notice
    until(lambda: "NO TARGET" in (said.text() if first else said.text))
    assert bundle.is_dir()
    out = io.StringIO()
    with JsonProgress(out).stage("comparing", 2) as advance:
        advance()
        advance()
    assert [json.loads(line)["part"] for line in out.getvalue().splitlines()] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("pause", [0.02, 60.0])
def test_the_window_is_measured(connected, monkeypatch, pause):
    """Also while an answer that is shorter than a typist's pause streams."""
    monkeypatch.setattr(typist, "_KEY_SECONDS", pause)
    figures = measure_answer(connected, "a link")
    assert figures["answer"]["tokens"] > 0 and figures["echo"]["keys"] > 0
    assert 0 < figures["echo"]["median_ms"] <= figures["echo"]["p95_ms"] <= figures["echo"]["worst_ms"]
    assert 0 < figures["processor"]["window_and_runtime_percent"] <= figures["processor"]["with_drafter_percent"]


def test_signals_take_no_references_away():
    """PySide6 6.12.0 did, and a program ended after some thousands of signals (Python before 3.12)."""
    from PySide6.QtCore import QObject, Signal

    class Sender(QObject):
        sent = Signal()

    sender, before = Sender(), sys.getrefcount(True)
    for _ in range(100):
        sender.sent.emit()
    assert sys.getrefcount(True) >= before - 10
