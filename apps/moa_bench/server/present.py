"""Tables and plot of a server result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table, format_cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = [
    "sessions",
    "mode",
    "tokens/s",
    "by window",
    "tokens/CPU s",
    "ms/token",
    "p50",
    "p95",
    "first token ms",
    "p95",
    "passes/token",
    "tokens/round",
    "peak MB",
    "client CPU",
]


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    rows = [_row(count, mode, load) for count, modes in result["sessions"].items() for mode, load in modes.items()]
    drafting = list(dict.fromkeys(mode for modes in result["speedup"].values() for mode in modes))
    return [
        Table(_HEADER, rows),
        Table(
            ["sessions", *drafting],
            [[count, *map(modes.get, drafting)] for count, modes in result["speedup"].items()],
            title=f"tokens/s by those of {_base(result)}",
            note="\n".join([_conditions(result), *_skipped(result)]),
        ),
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [
        (f"tokens/s of {count} sessions, {mode} by {_base(result)}", ratio)
        for count, modes in result["speedup"].items()
        for mode, ratio in modes.items()
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Tokens per second and the slow end of latency, against the number of sessions."""
    speed, latency = figure.subplots(1, 2)
    for mode in dict.fromkeys(mode for modes in result["sessions"].values() for mode in modes):
        loads = [(int(count), modes[mode]) for count, modes in result["sessions"].items() if mode in modes]
        _line(speed, mode, [(count, load["tokens_per_s"]) for count, load in loads])
        _line(latency, mode, [(count, load["ms_per_token"]["p95"]) for count, load in loads])
    ticks = [int(count) for count in result["sessions"]]
    speed.set(title="all sessions together", xlabel="sessions", ylabel="tokens/s", xticks=ticks, ylim=(0, None))
    latency.set(title="as a session sees it", xlabel="sessions", ylabel="ms/token, p95", xticks=ticks, ylim=(0, None))
    if ticks:
        speed.legend()


def _base(result: dict[str, Any]) -> str:
    """What the others are compared with."""
    engines = result["settings"]["engines"]
    return f"{engines[0]} stream" if len(engines) > 1 else "stream"


def _line(axes: Any, mode: str, points: list[tuple[int, float | None]]) -> None:
    known = [(count, figure) for count, figure in points if figure is not None]
    axes.plot([count for count, _ in known], [figure for _, figure in known], marker="o", label=mode)


def _row(count: str, mode: str, load: dict[str, Any]) -> list[object]:
    return [
        count,
        mode,
        load["tokens_per_s"],
        _range(load["tokens_per_s_by_window"]),
        load["tokens_per_cpu_s"],
        load["ms_per_token"]["mean"],
        load["ms_per_token"]["p50"],
        load["ms_per_token"]["p95"],
        load["ttft_ms"]["mean"],
        load["ttft_ms"]["p95"],
        load["passes_per_token"],
        load["tokens_per_round"],
        load["peak_memory_mb"],
        load["client_cpu_share"],
    ]


def _range(figures: list[float]) -> str:
    return f"{format_cell(min(figures))} - {format_cell(max(figures))}"


def _conditions(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sampling = settings["sampling"]
    how = f"temperature {sampling['temperature']}, top-p {sampling['top_p']}, seed {sampling['seed']}"
    apart = "" if settings["pinned"] else "not "
    return (
        f"{settings['repeats']} windows of {settings['seconds']:g} s each, draft length {settings['draft_length']}, "
        f"{how if sampling['temperature'] else 'greedy'}, answers of at most {settings['max_new_tokens']} tokens; "
        f"processors for all clients: {settings['client_cpus']}, {apart}kept apart from the verifier's"
    )


def _skipped(result: dict[str, Any]) -> list[str]:
    return [f"skipped: question {question['question_id']}: {question['reason']}" for question in result["skipped"]]
