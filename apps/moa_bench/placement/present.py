"""Tables and plot of scenarios."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.placement.scenarios import CHANGES
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of the best one's milliseconds a token, in every scenario.
AIM = 1.05
_WORST = 10


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    scenarios, settings = result["scenarios"], result["settings"]
    kinds = [(best, change) for best in ("device", "server") for change in CHANGES]
    rows = [_row(*kind, [each for each in scenarios if (each["best"], each["change"]) == kind]) for kind in kinds]
    worst = sorted(scenarios, key=lambda each: -each["ratio"])[:_WORST]
    return [
        Table(
            ["best", "change", "scenarios", "median", "99 of 100", "worst", f"at {AIM} or below", "by the server"],
            [*(row for row in rows if row[2]), _row("all", "", scenarios)],
            title="ms/token of auto by those of whoever is faster:",
            note=f"{settings['answers']} answers of {settings['drafter']}; {settings['tokens_of_a_scenario']} tokens a "
            f"scenario, seed {settings['seed']}, {result['seconds']:.0f} s; by the server: share of auto's tokens that "
            "it wrote by itself",
        ),
        Table(
            ["ratio", "change", "auto", "device", "server", "trip", "pass", "queue", "step", "server's step"],
            [_worst_row(each) for each in worst],
            title="The worst (times in ms; auto, device and server a token):",
        ),
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    ratios = [each["ratio"] for each in result["scenarios"]]
    return [
        ("ms/token of auto by the best, median", median(ratios) if ratios else None),
        (f"scenarios at {AIM} or below", _reached(ratios)),
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """The ratios, sorted; and who drafted, by round trip and by how much faster the server is."""
    scenarios = result["scenarios"]
    ranks, who = figure.subplots(1, 2)
    ratios = sorted(each["ratio"] for each in scenarios)
    ranks.plot([100 * (at + 0.5) / len(ratios) for at in range(len(ratios))], ratios)
    ranks.axhline(AIM, linestyle="--", linewidth=1, color="grey")
    ranks.set(title="all scenarios", xlabel="scenarios below (%)", ylabel="ms/token of auto by those of the best")
    gains = [each["ms_per_token"]["device"] / each["ms_per_token"]["server"] for each in scenarios]
    drawn = who.scatter(
        [each["ms"]["trip"] for each in scenarios], gains, c=[each["pushed"] for each in scenarios], s=6
    )
    who.axhline(1.0, linestyle="--", linewidth=1, color="grey")
    who.set(title="who drafts with auto", xlabel="round trip, ms", ylabel="ms/token of device by server")
    who.set(xscale="log", yscale="log")
    figure.colorbar(drawn, ax=who, label="share written by the server")


def _row(best: str, change: str, scenarios: list[dict[str, Any]]) -> list[object]:
    ratios = sorted(each["ratio"] for each in scenarios)
    if not ratios:
        return [best, change, 0, *[None] * 5]
    high = ratios[min(len(ratios) - 1, int(0.99 * len(ratios)))]
    pushed = sum(each["pushed"] for each in scenarios) / len(scenarios)
    return [best, change, len(ratios), median(ratios), high, ratios[-1], _reached(ratios), pushed]


def _worst_row(each: dict[str, Any]) -> list[object]:
    tokens, times = each["ms_per_token"], each["ms"]
    taken = (tokens[drafting] for drafting in ("auto", "device", "server"))
    named = (times[name] for name in ("trip", "pass", "queue", "step", "server_step"))
    return [each["ratio"], each["change"], *taken, *named]


def _reached(ratios: list[float]) -> float | None:
    return sum(ratio <= AIM for ratio in ratios) / len(ratios) if ratios else None
