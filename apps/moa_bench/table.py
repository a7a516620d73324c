"""Tables: made once from a result, shown in the terminal or on the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Rows under a header. ``title`` stands above them and ``note`` below; both may be empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""

    def text(self) -> str:
        """Format the table for the terminal."""
        return "\n".join(filter(None, (self.title, format_table(self.header, self.rows), self.note)))


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align the first column left and the others right, two spaces apart.

    ``format_table(["task", "tau"], [["qa", 2.5]])`` is ``"task    tau\\nqa    2.500"``.
    """
    cells = [list(header), *([format_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)


def format_cell(value: object) -> str:
    """Format floats with three decimals below 10 and one above, None as a dash, booleans as ``yes`` and ``NO``."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def sampling_note(sampling: Mapping[str, Any]) -> str:
    """Say how the target chose its tokens: ``greedy``, or the temperature, top-p and seed."""
    if not sampling["temperature"]:
        return "greedy"
    return f"temperature {sampling['temperature']}, top-p {sampling['top_p']}, seed {sampling['seed']}"


def skipped_notes(result: Mapping[str, Any]) -> list[str]:
    """Make a line for each question (or turn of one) that was not asked, with the reason."""
    return [
        f"skipped: question {each['question_id']}"
        + (f" from turn {each['turn']} on" if "turn" in each else "")
        + f": {each['reason']}"
        for each in result["skipped"]
    ]
