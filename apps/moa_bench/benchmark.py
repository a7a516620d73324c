"""What a benchmark is: one class with options, a measurement, tables and a plot. The runner does the rest."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moa_bench.table import Table
from moa_runtime.bundle import Fingerprints

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a benchmark has measured so far.

    Attributes:
        figures: makes the plain figures for JSON, called once: at the end, or when something ends the measurement.
        settings: see :func:`moa_bench.result.result_of`.
        fingerprints: of the target, tokenizer and drafter.
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
        extra: the optional install that measuring needs.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    summary: ClassVar[str]
    description: ClassVar[str]
    extra: ClassVar[str] = "bench"

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own options."""

    @abstractmethod
    def measure(self, args: argparse.Namespace) -> Generator[Measured, None, None]:
        """Measure, and yield once when everything is loaded and then after each part that counts.

        Whatever was yielded before an interruption or an error is shown as a partial result.

        Raises:
            MoaError: bad input, or a failure; before the second yield it ends the command without a result.
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
