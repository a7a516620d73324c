"""Tables and plot of an outage result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WHO = {"finish": "finishes the answer", "stop": "stops"}


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    settings = result["settings"]
    rows = [
        [
            _WHO[mode],
            each["answers"],
            each["confirmed"],
            each["tentative"],
            each["kept"],
            each["hello_ms"],
            each["token_ms"],
            each["whole_ms"],
            "yes" if each["identical"] else "NO",
        ]
        for mode, each in result["modes"].items()
        if each["answers"]
    ]
    skipped = f"; skipped: {len(result['skipped'])}" if result["skipped"] else ""
    return [
        Table(
            [
                "while away the verifier",
                "answers",
                "confirmed",
                "written offline",
                "kept",
                "ms to the Hello",
                "from it to a token",
                "to the whole answer",
                "identical",
            ],
            rows,
            title=f"{settings['outage_s']:g} s without {settings['profile']}, {settings['after']} tokens into answers",
            note=f"means over answers of at most {settings['max_new_tokens']} tokens{skipped}",
        )
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [("ms from the Hello to the whole answer", result["modes"]["finish"]["whole_ms"])]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Seconds from the Hello to the whole answer."""
    modes = {mode: each for mode, each in result["modes"].items() if each["answers"]}
    axes = figure.subplots()
    axes.bar([_WHO[mode] for mode in modes], [each["whole_ms"] / 1000 for each in modes.values()])
    axes.set(ylabel="s from the Hello to the whole answer", xlabel="while away the verifier")
