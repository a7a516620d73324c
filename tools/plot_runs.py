"""Show held-out loss and tau of training runs against the answer tokens that they were trained on.

The figures are those that ``moa-train`` writes into ``OUT/log.jsonl``; nothing is measured here.

    python tools/plot_runs.py run eagle=runs/eagle --plot curve.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from moa_bench.benchmark import Table
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError

LOG_FILE = "log.jsonl"
_NUMBERS = ("tokens", "tau")
_PANELS = {"tau": "tau", "loss": "loss (nats)"}
#: Runs beyond the number of colours are told apart by these.
_MARKERS = "osD^v<>"

#: Evaluations by the name of their run, each in rising order of ``tokens``.
Runs = dict[str, list[dict[str, Any]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, see :func:`moa_runtime.cli_main.run_program`."""
    parser = argparse.ArgumentParser(
        prog="plot_runs", description="Show tau and held-out loss of training runs against their answer tokens."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN", help="folder of a run, or its log.jsonl; NAME is for the plot"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (.png, .svg or .pdf)")

    def work() -> int:
        args = parser.parse_args(argv)
        runs = read_runs(args.runs)
        print(json.dumps({"runs": runs}) if args.json else table_of(runs).text())
        if args.plot is not None:
            plot(runs, args.plot)
        return 0

    return run_program("plot_runs", work)


def read_runs(arguments: Sequence[str]) -> Runs:
    """Read the runs that ``[NAME=]PATH`` arguments name.

    Raises:
        MoaError: a log that cannot be read, or two runs of one name.
    """
    runs: Runs = {}
    for argument in arguments:
        name, evaluations = read_run(argument)
        if name in runs:
            raise MoaError(
                f"two runs are called {name!r}: give one another name, as NAME={argument}", code="duplicate_name"
            )
        runs[name] = evaluations
    return runs


def read_run(argument: str) -> tuple[str, list[dict[str, Any]]]:
    """Read a run's name and its evaluations.

    Args:
        argument: ``PATH`` or ``NAME=PATH`` of a folder that ``moa-train`` wrote, or of its ``log.jsonl``. The name is
            the folder's by default. An evaluation without ``loss`` (nats) has None there.

    Raises:
        MoaError: no log there, or a line that is no evaluation (the message gives its number).
    """
    name, _, rest = argument.rpartition("=")
    path = Path(rest)
    log = path / LOG_FILE if path.is_dir() else path
    try:
        lines = log.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MoaError(
            f"cannot read {log}: {error}; expected what moa-train writes as OUT/{LOG_FILE}", code="unreadable"
        ) from error
    found = [_evaluation(line, f"{log}, line {number}") for number, line in enumerate(lines, 1)]
    if not found:
        raise MoaError(f"{log} holds no evaluation yet: train until the first one", code="empty")
    return name or (path if path.is_dir() else path.parent).resolve().name, sorted(found, key=lambda e: e["tokens"])


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Make a row of each evaluation."""
    depths = max(len(evaluation["accuracy_by_depth"]) for run in runs.values() for evaluation in run)
    rows = [
        [name, entry["tokens"], entry["loss"], entry["tau"], *_padded(entry["accuracy_by_depth"], depths)]
        for name, run in runs.items()
        for entry in run
    ]
    header = ["run", "answer tokens", "loss (nats)", "tau", *(f"depth {depth}" for depth in range(1, depths + 1))]
    return Table(header, rows, title="Loss, tau and accuracy by depth, as measured during training")


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw tau, and loss beside it if a run has it, against training tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    known = {name for run in runs.values() for entry in run for name in _PANELS if entry[name] is not None}
    panels = [(name, title) for name, title in _PANELS.items() if name in known]
    for axes, (name, title) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        for (run, evaluations), marker in zip(runs.items(), cycle(_MARKERS), strict=False):
            points = [(entry["tokens"], entry[name]) for entry in evaluations if entry[name] is not None]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=run)
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="answer tokens trained on", xscale="log")
    # One legend below all panels: a panel has no room for a dozen runs.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def _evaluation(line: str, where: str) -> dict[str, Any]:
    """Parse a line of a log. Raises MoaError."""
    try:
        raw = json.loads(line)
        numbers = {name: float(raw[name]) for name in _NUMBERS}
        loss = None if raw.get("loss") is None else float(raw["loss"])
        depths = [None if share is None else float(share) for share in raw["accuracy_by_depth"]]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MoaError(
            f"{where}: expected an evaluation with {', '.join(_NUMBERS)} and accuracy_by_depth", code="malformed"
        ) from error
    return {**numbers, "tokens": int(numbers["tokens"]), "loss": loss, "accuracy_by_depth": depths}


def _padded(shares: list[float | None], depths: int) -> list[float | None]:
    return shares + [None] * (depths - len(shares))


if __name__ == "__main__":
    sys.exit(main())
