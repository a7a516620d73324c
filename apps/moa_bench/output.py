"""How every benchmark shows its result: tables or JSON on stdout, a plot in a file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moa_bench.output_file import check_output_file
from moa_bench.table import Table
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Headline = tuple[str, object]  # what it is, with its unit; the figure, None where there is none
INTERRUPTED = "interrupted before everything was measured"


class Presentation(Protocol):
    """A benchmark's ``present`` module. Its functions know a result from its JSON alone, also a partial
    one, so that the report can show results of earlier runs.

    It may also offer ``headlines(result) -> list[Headline]``, the figures to read first; by default there
    are none, see :func:`headlines_of`.
    """

    def tables(self, result: dict[str, Any]) -> list[Table]:
        """What the terminal and the report show."""

    def draw(self, result: dict[str, Any], figure: Figure) -> None:
        """Fill an empty matplotlib figure."""


def headlines_of(result: dict[str, Any], presentation: Presentation) -> list[Headline]:
    """The figures to read first, the most important one leading."""
    offered = getattr(presentation, "headlines", None)
    return [] if offered is None else offered(result)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (.png, .svg or .pdf)")


def check_output_options(args: argparse.Namespace) -> None:
    """Refuse before the measurement what could not be written after it.

    Raises:
        MoaError: no such kind of plot, a file that cannot be written, or matplotlib is not installed.
    """
    if args.plot is None:
        return
    if args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise MoaError(f"--plot {args.plot} must end with .png, .svg or .pdf")
    check_output_file("plot", args)
    require_extra("bench", "moa-bench --plot")


def finish(result: dict[str, Any], args: argparse.Namespace, presentation: Presentation) -> int:
    """Print the result and write its plot.

    Returns:
        exit status: 0; 130 after an interruption; 1 if something else ended the measurement early.
    """
    if args.json:
        print(json.dumps(result))
    else:
        print("\n\n".join(table.text() for table in presentation.tables(result)))
    if args.plot is not None:
        plot(result, presentation, args.plot)
    if not result["partial"]:
        return 0
    print(f"moa-bench: partial result: {result['problem']}", file=sys.stderr)
    return 130 if result["problem"] == INTERRUPTED else 1


def plot(result: dict[str, Any], presentation: Presentation, path: Path) -> None:
    """Draw ``result`` into a file of the kind its name says."""
    figure_of(result, presentation).savefig(path, dpi=150)


def figure_of(result: dict[str, Any], presentation: Presentation) -> Figure:
    """The plot of ``result``, in matplotlib's current style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    presentation.draw(result, figure)
    return figure
