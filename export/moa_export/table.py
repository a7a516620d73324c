"""The summary of what a bundle holds, a line for each graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HEADER = ("graph", "file", "MB", "parity", "top-1", "error (nats)", "tau before", "after", "perplexity", "ms a step")


@dataclass(frozen=True)
class Row:
    """One graph; ``checks`` as in the manifest, ``step_ms`` None where it was not measured."""

    name: str
    file: str
    bytes: int
    checks: Mapping[str, Mapping[str, Any]]
    step_ms: float | None = None


def format_rows(rows: Sequence[Row]) -> str:
    """Columns two spaces apart, names to the left, figures to the right."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def left_out(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why checks of a graph were not made."""
    said = {
        (row.name, str(check["reason"])): None
        for row in rows
        for check in row.checks.values()
        if check["status"] == "not run"
    }
    return [f"{name}: not run: {reason}" for name, reason in said]


def _cells(row: Row) -> tuple[str, ...]:
    parity, tau = row.checks.get("parity") or row.checks.get("perplexity", {}), row.checks.get("tau", {})
    return (
        row.name,
        row.file,
        f"{row.bytes / 1e6:.1f}",
        str(parity.get("status", "-")),
        f"{parity['top1_agreement']:.1%}" if "top1_agreement" in parity else "-",
        f"{parity['mean_logprob_error']:.4f}" if "mean_logprob_error" in parity else "-",
        f"{tau['before']:.3f}" if "before" in tau else "-",
        f"{tau['after']:.3f}" if "after" in tau else "-",
        f"x {parity['ratio']:.3f}" if "ratio" in parity else "-",
        "-" if row.step_ms is None else f"{row.step_ms:.2f}",
    )
