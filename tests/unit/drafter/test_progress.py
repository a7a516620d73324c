"""Progress of long work."""

from __future__ import annotations

import pytest

from moa_drafter import progress
from moa_drafter.progress import Progress


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    counted = Progress(range(3), desc="network", unit="answer")
    assert capsys.readouterr().err.count("\n") == 1
    assert list(counted) == [0, 1, 2] and capsys.readouterr().err == ""  # it did not take a minute
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with Progress(total=3, desc="network", unit="answer") as bar:
        bar.update()
        bar.update(2)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    for line, number in ((lines[0], 0), (lines[1], 1), (lines[-1], 3)):
        assert line.startswith(f"network: {number} of 3 answers")
    assert "\r" not in printed.err and printed.out == ""


def test_on_a_terminal_there_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    list(Progress(range(3), desc="network", unit="answer"))
    assert "\r" in capsys.readouterr().err
