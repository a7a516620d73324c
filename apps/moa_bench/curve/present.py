"""Table and plot of training curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(result: dict[str, Any]) -> list[Table]:
    """See :class:`moa_bench.output.Presentation`."""
    depths = max(len(evaluation["accuracy_by_depth"]) for run in result["runs"].values() for evaluation in run)
    rows = [
        [name, entry["tokens"], entry["loss"], entry["tau"], *_padded(entry["accuracy_by_depth"], depths)]
        for name, run in result["runs"].items()
        for entry in run
    ]
    return [
        Table(
            ["run", "answer tokens", "loss (nats)", "tau", *(f"depth {depth}" for depth in range(1, depths + 1))],
            rows,
            title="Held-out conversations: loss, tau of a greedy chain, share of right tokens by depth",
        )
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Tau, and loss beside it, against training tokens."""
    panels = (("tau", "tau (greedy chain, held-out answers)"), ("loss", "loss (nats)"))
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for run, evaluations in result["runs"].items():
            tokens = [entry["tokens"] for entry in evaluations]
            axes.plot(tokens, [entry[name] for entry in evaluations], marker="o", markersize=3, label=run)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="answer tokens trained on", xscale="log")
        axes.legend()


def _padded(shares: list[float | None], depths: int) -> list[float | None]:
    return shares + [None] * (depths - len(shares))
