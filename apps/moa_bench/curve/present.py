"""Table and plot of training curves."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

from moa_bench.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_PANELS = {"tau": "tau", "loss": "loss (nats)"}
#: More runs than colours stay apart by these.
_MARKERS = "osD^v<>"


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
            title="Loss, tau and share of right tokens by depth, as the runs have measured them",
        )
    ]


def draw(result: dict[str, Any], figure: Figure) -> None:
    """Tau, and loss beside it where a run has it, against training tokens."""
    runs = result["runs"]
    known = {name for run in runs.values() for entry in run for name in _PANELS if entry[name] is not None}
    panels = [(name, title) for name, title in _PANELS.items() if name in known]
    for axes, (name, title) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        for (run, evaluations), marker in zip(runs.items(), cycle(_MARKERS), strict=False):
            points = [(entry["tokens"], entry[name]) for entry in evaluations if entry[name] is not None]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=run)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="answer tokens trained on", xscale="log")
    # One for all panels, below them: beside a dozen runs there is no room in a panel.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _padded(shares: list[float | None], depths: int) -> list[float | None]:
    return shares + [None] * (depths - len(shares))
