"""Progress of long work."""

from __future__ import annotations

from moa_drafter import progress
from moa_drafter.progress import Progress


def test_without_a_terminal_there_are_lines(capsys, monkeypatch):
    counted = Progress(range(3), desc="network", unit="answer")
    assert capsys.readouterr().err.count("\n") == 1
    assert list(counted) == [0, 1, 2] and capsys.readouterr().err == ""  # it did not take a minute
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    with Progress(total=3, desc="network", unit="answer") as bar:
        bar.update()
        bar.update(2)
    printed = capsys.readouterr()
    numbers = [int(line.split()[1]) for line in printed.err.splitlines()]
    assert sorted({*numbers}) == [0, 1, 3] and "\r" not in printed.err and printed.out == ""


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    list(Progress(range(3), desc="network", unit="answer"))
    assert "\r" in capsys.readouterr().err
