"""How far long work is."""

from __future__ import annotations

import pytest

from moa_drafter import progress
from moa_drafter.progress import Progress


def test_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Progress(range(3), desc="network", unit="answer")
    begun = capsys.readouterr().err
    assert begun.startswith("network: 0 of 3 answers, 00:00 gone") and begun.count("\n") == 1
    assert list(asked) == [0, 1, 2] and capsys.readouterr().err == ""  # it did not take a minute
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with Progress(total=3, desc="network", unit="answer") as bar:
        bar.update()
        bar.update(2)
    said = capsys.readouterr()
    first, *lines = said.err.splitlines()
    assert first.startswith("network: 0 of 3 answers, 00:00 gone") and said.out == ""
    assert lines[0].startswith("network: 1 of 3 answers") and lines[-1].startswith("network: 3 of 3 answers")
    assert "\r" not in said.err


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    list(Progress(range(3), desc="network", unit="answer"))
    assert "\r" in capsys.readouterr().err
