"""Tables and plot of a network result."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEADER = (
    "mode",
    "answers",
    "first token ms",
    "ms/token",
    "p50",
    "p95",
    "longest gap ms",
    "tokens/round",
    "passes/token",
    "bytes up/token",
    "bytes down/token",
    "identical",
)
_PAIRED_HEADER = ("profile", "stream", "95 %", "best", "its ratio", "95 %")


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    last = next(reversed(result["profiles"]), None)
    loads = [
        Table(
            _HEADER,
            [_row(mode, figures) for mode, figures in modes.items()],
            title=profile,
            note="\n".join([_conditions(result), *_skipped(result)]) if profile == last else "",
        )
        for profile, modes in result["profiles"].items()
    ]
    paired = [_paired_row(profile, ratios) for profile, ratios in result["auto"].items()]
    return [*loads, Table(_PAIRED_HEADER, paired, title="auto, ms/token by those of")] if paired else loads


def _paired_row(profile: str, ratios: dict[str, Any]) -> list[object]:
    best, stream = ratios["best"], ratios.get("stream")
    return [profile, *_interval(stream), best["mode"], *_interval(best)]


def _interval(ratio: dict[str, Any] | None) -> list[object]:
    return [None, None] if ratio is None else [ratio["ratio"], f"{ratio['low']:.3f} - {ratio['high']:.3f}"]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    return [
        (f"ms per token over {profile}, {mode}", modes[mode]["ms_per_token"]["mean"])
        for profile, modes in result["profiles"].items()
        for mode in ("stream", "auto")
        if mode in modes
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Latency per token and time to the first token, by profile and mode."""
    latency, first = figure.subplots(1, 2)
    profiles = result["profiles"]
    per_token = {p: {m: f["ms_per_token"] for m, f in modes.items()} for p, modes in profiles.items()}
    _bars(
        latency,
        {p: {m: f["mean"] for m, f in modes.items()} for p, modes in per_token.items()},
        {p: {m: f["p95"] for m, f in modes.items()} for p, modes in per_token.items()},
    )
    latency.set(title="time per token", ylabel="ms (bar: mean, whisker: up to the 95th percentile)")
    _bars(first, {p: {m: f["ttft_ms"] for m, f in modes.items()} for p, modes in profiles.items()})
    first.set(title="time to the first token", ylabel="ms (mean)")
    latency.legend()


_Figures = dict[str, dict[str, float | None]]  # by profile and mode


def _bars(axes: Axes, heights: _Figures, tops: _Figures | None = None) -> None:
    """A group of bars for each profile; whiskers from ``heights`` up to ``tops``."""
    modes = list(next(iter(heights.values())))
    width = 0.8 / len(modes)
    for number, mode in enumerate(modes):
        at = [group + (number - (len(modes) - 1) / 2) * width for group in range(len(heights))]
        bars = [_or_nan(heights[profile][mode]) for profile in heights]
        whiskers = None
        if tops is not None:
            up = [max(0.0, _or_nan(tops[profile][mode]) - bar) for profile, bar in zip(heights, bars, strict=True)]
            whiskers = [[0.0] * len(bars), up]
        axes.bar(at, bars, width, yerr=whiskers, capsize=2, label=mode)
    axes.set_xticks(range(len(heights)), list(heights))


def _or_nan(figure: float | None) -> float:
    return nan if figure is None else figure


def _row(mode: str, figures: dict[str, Any]) -> list[object]:
    latency = figures["ms_per_token"]
    return [
        mode,
        figures["answers"],
        figures["ttft_ms"],
        latency["mean"],
        latency["p50"],
        latency["p95"],
        figures["longest_gap_ms"],
        figures["tokens_per_round"],
        figures["passes_per_token"],
        figures["bytes_up_per_token"],
        figures["bytes_down_per_token"],
        figures["identical"],
    ]


def _conditions(result: dict[str, Any]) -> str:
    settings = result["settings"]
    sampling = settings["sampling"]
    how = f"temperature {sampling['temperature']}, top-p {sampling['top_p']}, seed {sampling['seed']}"
    return (
        f"draft length {settings['draft_length']}, {how if sampling['temperature'] else 'greedy'}, "
        f"answers of at most {settings['max_new_tokens']} tokens, {result['seconds']:.0f} s"
    )


def _skipped(result: dict[str, Any]) -> list[str]:
    return [f"skipped: question {question['question_id']}: {question['reason']}" for question in result["skipped"]]
