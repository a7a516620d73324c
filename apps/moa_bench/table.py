"""Tables: made once from a result, shown in the terminal or in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows under a header. ``title`` and ``note`` are sentences around it, perhaps empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""

    def text(self) -> str:
        """For the terminal."""
        return "\n".join(filter(None, (self.title, format_table(self.header, self.rows), self.note)))


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart, the first aligned left, the others right.

    ``format_table(["task", "tau"], [["qa", 2.5]])`` is ``"task    tau\\nqa    2.500"``.
    """
    cells = [list(header), *([format_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)


def format_cell(value: object) -> str:
    """Floats get three decimals below 10, else one; None a dash, truth values a word."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
