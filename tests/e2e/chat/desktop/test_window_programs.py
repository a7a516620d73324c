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
from moa_chat.desktop import programs
from moa_chat.desktop.export_program import JsonProgress
from moa_chat.desktop.programs import BundleExport, Program, VerifierProcess
from support.chat.desktop.window_driving import TOKEN, WAIT


def run(qtbot, script: str, environment: dict[str, str] | None = None) -> tuple[list[dict], object]:
    """What a program said, and how it ended."""
    program = Program([sys.executable, "-c", script], environment or {})
    said: list[dict] = []
    ended: list[object] = []
    program.said.connect(said.append)
    program.ended.connect(ended.append)
    program.start()
    qtbot.waitUntil(lambda: bool(ended), timeout=WAIT)
    return said, ended[0]


def test_a_program_says_objects_and_other_lines_are_passed_over(qtbot):
    script = "import os; print('noise'); print('{\"a\": ' + os.environ['A'] + '}'); print('[1]')"
    assert run(qtbot, script, {"A": "5"}) == ([{"a": 5}], None)


def test_a_program_that_fails_gives_its_last_words(qtbot):
    script = (
        "import sys; print('loud', file=sys.stderr); print('moa-serve: error: no room', file=sys.stderr); sys.exit(2)"
    )
    assert str(run(qtbot, script)[1]) == "no room"
    assert str(run(qtbot, "import sys; sys.exit(3)")[1]) == "exit status 3"


def test_a_program_that_is_not_there(qtbot):
    program = Program(["/nonexistent/program"], {})
    with qtbot.waitSignal(program.ended, timeout=WAIT) as ended:
        program.start()
    assert "could not be started" in str(ended.args[0])


def test_a_stopped_program_is_gone_and_silent(qtbot):
    program = Program([sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(600)"], {})
    ended: list[object] = []
    program.ended.connect(ended.append)
    with qtbot.waitSignal(program.said, timeout=WAIT):
        program.start()
    program.stop()
    assert not program.running and ended == []


@pytest.fixture
def instead(monkeypatch):
    """Runs this script in the place of moa-edge's own programs."""

    def run_instead(script: str) -> None:
        monkeypatch.setattr(programs, "own_program", lambda *_: [sys.executable, "-c", script])
        monkeypatch.setattr(programs, "require_extra", lambda *_: None)

    return run_instead


def test_a_verifier_of_this_machine(open_window, verifier, instead, monkeypatch, qtbot):
    """Its process says where it is; the window connects there with the token that it gave it."""
    url = json.dumps({"url": f"ws://127.0.0.1:{verifier.port}"})
    instead(f"import os, time; assert os.environ['MOA_TOKEN']; print('{url}', flush=True); time.sleep(600)")
    monkeypatch.setattr(programs.secrets, "token_urlsafe", lambda _: TOKEN)
    window = open_window(local=True)
    qtbot.waitUntil(lambda: window.page.pill.accessibleDescription() in ("online", "slow"), timeout=WAIT)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_window_leaves_no_verifier(tmp_path, qtbot):
    """The verifier is told to end with its standard input, and that ends with the window."""
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
        qtbot.waitUntil(begun.exists, timeout=WAIT)
        assert not ended.exists()
        process.kill()
    qtbot.waitUntil(ended.exists, timeout=WAIT)


def test_a_verifier_that_does_not_start_is_a_sentence(open_window, instead, qtbot):
    instead("import sys; print('moa-serve: error: the target cannot be fetched', file=sys.stderr); sys.exit(2)")
    window = open_window(local=True)
    qtbot.waitUntil(lambda: "the target cannot be fetched" in window.page.notice.text, timeout=WAIT)


@pytest.mark.parametrize("first", [False, True], ids=["later", "first run"])
def test_the_start_of_a_verifier_is_shown_and_can_be_given_up(open_window, instead, tmp_path, qtbot, first):
    ended = tmp_path / "ended"
    instead(
        "import pathlib, signal, sys, time\n"
        f"def end(*_): pathlib.Path({str(ended)!r}).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); time.sleep(600)"
    )
    window = open_window(local=not first)
    page, welcome = window.page, window.first_run
    if first:
        welcome.form.local.setChecked(True)
        welcome.start.click()
        qtbot.waitUntil(welcome.cancel.isVisible, timeout=WAIT)
        assert "being started" in welcome.form.state.text()
        qtbot.wait(300)  # for Python to know the signal
        welcome.cancel.click()
        assert "not started" in welcome.form.state.text() and welcome.start.isEnabled()
        assert not welcome.cancel.isVisible()
    else:
        assert page.progress.isVisible() and "being started" in page.progress.text
        qtbot.waitUntil(lambda: "(1 s)" in page.progress.text, timeout=WAIT)
        page.progress.button.click()
        assert not page.progress.isVisible() and "not started" in page.notice.text
        assert page.notice.button.text() == "Try again"
        page.notice.button.click()
        assert page.progress.isVisible()
    qtbot.waitUntil(ended.exists, timeout=WAIT)


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch):
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
    with qtbot.waitSignal(export.ended, timeout=WAIT), qtbot.waitSignal(verifier.failed, timeout=WAIT):
        export.start()
        verifier.start()
    folder = tmp_path / "bundles" / "early-exit"
    assert export.folder == folder and commands[0][1:] == (str(folder), "--drafter", "early-exit")
    assert commands[1][-2:] == ("--drafter", "early-exit") and not export.present
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert export.present


def test_the_export_shows_how_far_it_is(open_window, instead, qtbot, monkeypatch, tmp_path):
    bundle, go = tmp_path / "default", tmp_path / "go"
    monkeypatch.setenv("MOA_EDGE_BUNDLE", str(bundle))
    instead(
        "import json, pathlib, time; print(json.dumps({'stage': 'comparing', 'part': 0.25}), flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.02)\n"
        f"bundle = pathlib.Path({str(bundle)!r}); bundle.mkdir(); (bundle / 'manifest.json').touch()"
    )
    page = open_window(bundle="").first_run
    assert not page.start.isEnabled() and page.form.bundle.make.isVisible()
    page.form.bundle.make.click()
    qtbot.waitUntil(lambda: page.form.bundle.progress.value() == 25, timeout=WAIT)
    assert page.form.bundle.state.text() == "Comparing…"
    go.touch()
    qtbot.waitUntil(page.start.isEnabled, timeout=WAIT)
    assert "in the cache" in page.form.bundle.state.text() and not page.form.bundle.progress.isVisible()


def test_progress_as_data():
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
