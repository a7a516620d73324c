"""Tables and plot of an outage result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    settings = result["settings"]
    figures = ("answers", "confirmed", "tentative", "kept", "hello_ms", "token_ms", "whole_ms")
    row = [*map(result.get, figures), "yes" if result["identical"] else "NO"]
    skipped = f"; skipped: {len(result['skipped'])}" if result["skipped"] else ""
    return [
        Table(
            [
                "answers",
                "confirmed",
                "written offline",
                "kept",
                "ms to the Hello",
                "from it to a token",
                "to the whole answer",
                "identical",
            ],
            [row],
            title=f"{settings['outage_s']:g} s without {settings['profile']}, {settings['after']} tokens into answers",
            note=f"means over answers of at most {settings['max_new_tokens']} tokens{skipped}",
        )
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [("ms from the Hello to the whole answer", result["whole_ms"])]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Of each answer, the milliseconds from the link's return to the Hello, and from there to its end."""
    axes = figure.subplots()
    hello = [1000 * (each["hello_s"] or 0) for each in result["every"]]
    whole = [1000 * each["whole_s"] for each in result["every"]]
    axes.barh(range(len(hello)), hello, label="to the Hello")
    axes.barh(range(len(whole)), whole, left=hello, label="to the whole answer")
    axes.set(xlabel="ms from the link's return", ylabel="answer", yticks=range(len(whole)))
    if whole:
        axes.legend()
