"""What a benchmark is: one class with options, a measurement, tables and a plot. The runner does the rest."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moa_runtime.manifest import Fingerprints

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


Result = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a benchmark has measured so far.

    Attributes:
        figures: makes the plain figures for JSON, called once: at the end, or when something ends the measurement.
        settings: see :func:`moa_bench.result.result_of`.
    """

    figures: Callable[[], Mapping[str, Any]]
    settings: Mapping[str, Any]
    fingerprints: Fingerprints


class Benchmark(ABC):
    """One command of ``moa-bench``. Its ``tables`` and ``plot`` read a result from its JSON alone, and a partial one
    too.

    Attributes:
        name: of the command.
        purpose: a sentence for the page.
        summary: a line for ``moa-bench --help``.
        description: for the command's own ``--help``; it keeps its lines.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    summary: ClassVar[str]
    description: ClassVar[str]

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own options."""

    @abstractmethod
    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        """Measure, and yield once when everything is loaded and then after each part that counts.

        Whatever was yielded before an interruption or an error is shown as a partial result. Raises MoaError: bad
        input, or a failure; before the second yield it ends the command without a result.
        """

    @abstractmethod
    def tables(self, result: Result) -> list[Table]:
        """Make the tables that the terminal and the page show."""

    @abstractmethod
    def plot(self, result: Result, figure: Figure) -> None:
        """Fill an empty matplotlib figure."""


def figure_of(benchmark: Benchmark, result: Result) -> Figure:
    """Plot ``result`` in matplotlib's current style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    benchmark.plot(result, figure)
    return figure


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
