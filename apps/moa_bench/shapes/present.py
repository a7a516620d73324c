"""Tables and plot of scenarios."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of the best fixed shape's tokens a second, in every scenario.
AIM = 0.95
_KINDS = ("nothing", "copies", "chain", "tree")
_WORST = 10


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    scenarios, settings = result["scenarios"], result["settings"]
    rows = [_row(kind, [each for each in scenarios if each["best_kind"] == kind]) for kind in _KINDS]
    worst = sorted(scenarios, key=lambda each: each["share"])[:_WORST]
    return [
        Table(
            ["best fixed shape", "scenarios", "median", "worst", f"at {AIM} or above", "steps", "nodes", "branched"],
            [*(row for row in rows if row[1]), _row("all", scenarios)],
            title="Tokens a second of drafts at their price against those of the best fixed shape:",
            note=f"{settings['answers']} answers of {settings['drafter']}, {settings['tokens']} tokens; "
            f"{settings['tokens_of_a_scenario']} tokens a scenario; steps and nodes of a draft on average; "
            f"{settings['fixed_shapes']} fixed shapes, seed {settings['seed']}, {result['seconds']:.0f} s",
        ),
        Table(
            ["best fixed shape", "share", "step", "query", "pass", "token", "round trip", "steps", "nodes", "tau"],
            [
                [
                    each["best"],
                    each["share"],
                    *(each["pace_ms"][name] for name in ("step", "query", "pass", "token", "round_trip")),
                    each["steps"],
                    each["nodes"],
                    each["tau"],
                ]
                for each in worst
            ],
            title="The worst (times in ms):",
        ),
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    shares = [each["share"] for each in result["scenarios"]]
    return [
        ("tokens a second against the best fixed shape, median", median(shares) if shares else None),
        (f"scenarios at {AIM} or above", _reached(shares)),
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """The shares, sorted and by the size of drafts."""
    scenarios = result["scenarios"]
    ranks, sizes = figure.subplots(1, 2)
    shares = sorted(each["share"] for each in scenarios)
    ranks.plot([100 * (at + 0.5) / len(shares) for at in range(len(shares))], shares)
    ranks.set(title="all scenarios", xlabel="scenarios below (%)", ylabel="share of the best fixed shape's tokens/s")
    for kind in _KINDS:
        points = [(each["nodes"], each["share"]) for each in scenarios if each["best_kind"] == kind]
        if points:
            sizes.plot(*zip(*points, strict=True), ".", markersize=4, label=f"best: {kind}")
    sizes.set(title="by size", xlabel="nodes of a draft, mean")
    for axes in (ranks, sizes):
        axes.axhline(AIM, linestyle="--", linewidth=1, color="grey")
    sizes.legend()


def _row(name: str, scenarios: list[dict[str, Any]]) -> list[object]:
    shares = [each["share"] for each in scenarios]
    if not shares:
        return [name, 0, *[None] * 6]
    means = (sum(each[figure] for each in scenarios) / len(scenarios) for figure in ("steps", "nodes", "branched"))
    return [name, len(shares), median(shares), min(shares), _reached(shares), *means]


def _reached(shares: list[float]) -> float | None:
    return sum(share >= AIM for share in shares) / len(shares) if shares else None
