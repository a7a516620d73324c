"""What the code base promises of itself: no import circles, and documents that are no longer than they may be."""

from __future__ import annotations

from pathlib import Path

from code_figures import measure, read_working_tree


def test_the_figures_of_the_working_tree(monkeypatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    figures = measure(read_working_tree())
    assert figures["Python: product files"] > 100 and figures["TypeScript: product files"] > 50
    assert figures["Python: import circles"] == figures["TypeScript: import circles"] == 0
    assert figures["words: README.md"] <= 1000 and figures["words: docs/"] <= 32_000
