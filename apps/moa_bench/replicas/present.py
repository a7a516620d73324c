"""Tables and plot of a replicas result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("median", "p95", "max")


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    settings = result["settings"]
    rows = [
        [event["event"], event["resumes"], *map(event["s_to_go_on"].get, _PARTS), event["replica_s"]]
        for event in result["events"]
    ]
    return [
        Table(
            ["a replica was", "resumes", "s to go on, median", "p95", "max", "s until replaced"],
            rows,
            title=f"{settings['sessions']} sessions, {settings['replicas']} replicas behind {settings['behind']}",
            note=f"{result['tokens']} tokens in {result['answers']} answers of at most {settings['max_new_tokens']}; "
            f"{result['different']} of {result['compared']} differ from plain decoding; "
            f"{result['other_resumes']} resumes before all of this",
        )
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [(f"s to go on, a replica {each['event']}, p95", each["s_to_go_on"]["p95"]) for each in result["events"]]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Seconds to go on."""
    axes = figure.subplots()
    events = [event for event in result["events"] if event["resumes"]]
    for at, part in enumerate(_PARTS):
        places = [number + 0.25 * (at - 1) for number in range(len(events))]
        axes.bar(places, [event["s_to_go_on"][part] for event in events], width=0.25, label=part)
    axes.set(ylabel="s to go on", xticks=range(len(events)), xticklabels=[event["event"] for event in events])
    if events:
        axes.legend()
