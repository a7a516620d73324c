"""The soak as one picture: memory, descriptors, the honest clients' steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw the samples' rows into ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seconds = [row["second"] for row in rows]
    figure, (memory, descriptors, steps) = plt.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    memory.plot(seconds, [row["memory"] / 1e6 for row in rows])
    memory.set(ylabel="memory (MB)", ylim=(0, None))
    descriptors.plot(seconds, [row["descriptors"] for row in rows])
    descriptors.set(ylabel="descriptors", ylim=(0, None))
    for name in ("draft", "stream"):
        for kind in ("p50", "p95", "longest"):
            values = [row[f"{name}_{kind}_ms"] for row in rows]
            steps.plot(seconds, [float("nan") if value is None else value for value in values], label=f"{name}, {kind}")
    steps.set(ylabel="honest step (ms)", xlabel="seconds", yscale="log")
    steps.legend(ncols=2, fontsize="small")
    figure.savefig(out)
    plt.close(figure)
