"""Tables and plot of an offline result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.output import Headline
from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    return [
        Table(
            ["written offline by", "length", "on screen", "agree", "survive", "share kept"],
            _rows(result, "written", "agreement", "kept", "share_kept"),
            title="Tokens per outage: on screen meanwhile, agreeing with the target's own, surviving the reconnection",
        ),
        Table(
            ["written offline by", "length", "perplexity", "target's", "ratio", "distinct", "target's"],
            _rows(result, "perplexity", "target_perplexity", "perplexity_ratio", "distinct", "target_distinct"),
            title="The text under the target, beside the target's own of the same length (distinct: share of 4-grams)",
            note="\n".join([_conditions(result), *_skipped(result)]),
        ),
    ]


def headlines(result: dict[str, Any]) -> list[Headline]:
    """See :class:`moa_bench.output.Presentation`."""
    longest = result["settings"]["lengths"][-1]
    writer = next(iter(result["writers"]))
    figures = result["writers"][writer][str(longest)]
    return [
        (f"perplexity of {longest} offline tokens of {writer}, ratio to the target's own", figures["perplexity_ratio"]),
        ("leading offline tokens that agree with the target", figures["agreement"]),
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Agreement, perplexity ratio and repetition against the length written."""
    lengths = result["settings"]["lengths"]
    panels = {
        "agreement": "leading tokens that agree",
        "perplexity_ratio": "perplexity, ratio to the target's",
        "distinct": "share of distinct 4-grams",
    }
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for writer, figures in result["writers"].items():
            values = [figures[str(length)][name] for length in lengths]  # matplotlib leaves out None
            axes.plot(lengths, values, marker="o", label=writer)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="tokens written offline", xscale="log", xticks=lengths, xticklabels=lengths, ylim=(0, None))
        axes.minorticks_off()
        axes.legend()


def _rows(result: dict[str, Any], *names: str) -> list[list[object]]:
    return [
        [writer, int(length), *(figures[name] for name in names)]
        for writer, lengths in result["writers"].items()
        for length, figures in lengths.items()
    ]


def _conditions(result: dict[str, Any]) -> str:
    return (
        f"questions: {result['questions']}, greedy, the link cut after {result['settings']['after']} tokens "
        f"of the answer, {result['seconds']:.0f} s"
    )


def _skipped(result: dict[str, Any]) -> list[str]:
    return [f"skipped: question {question['question_id']}: {question['reason']}" for question in result["skipped"]]
