"""The runner of all benchmarks: options of the output, partial results, tables, JSON, plots, pages, exit status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from moa_bench import options
from moa_bench.benchmark import Benchmark, Measured, figure_of
from moa_bench.html_page import render
from moa_bench.result import result_of
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.optional_deps import require_extra
from moa_runtime.paths import resolved

INTERRUPTED = "interrupted before everything was measured"
#: Options that name a file to write, as far as a command has them.
_OUTPUTS = ("plot", "html", "timeline")
_PLOTS = (".png", ".svg", ".pdf")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    add = options.adder(parser)
    add("--json", "print one JSON object instead of tables", action="store_true")
    add("--plot FILE", "write a plot (.png, .svg or .pdf)")
    add("--html FILE", "write tables, plot, settings, machine and versions as one page")


def run(benchmark: Benchmark, args: argparse.Namespace) -> int:
    """Measure, print the result and write its files.

    Returns:
        exit status: 0; 130 after an interruption; 1 if something else ended the measurement early.

    Raises:
        MoaError: bad input, or a failure before anything was measured.
        KeyboardInterrupt: before anything was measured.
    """
    check_outputs(args)
    require_extra("bench", f"moa-bench {benchmark.name}")
    result = _measured(benchmark, args)
    print(json.dumps(result) if args.json else "\n\n".join(table.text() for table in benchmark.tables(result)))
    if args.plot is not None:
        figure_of(benchmark, result).savefig(args.plot, dpi=150)
    if args.html is not None:
        page = render(benchmark, result)
        args.html.write_text(page, encoding="utf-8", errors="backslashreplace")  # names of files need not be UTF-8
    if not result["partial"]:
        return 0
    print(f"moa-bench: partial result: {result['problem']}", file=sys.stderr)
    return 130 if result["problem"] == INTERRUPTED else 1


def _measured(benchmark: Benchmark, args: argparse.Namespace) -> dict[str, Any]:
    measured: Measured | None = None
    parts, began, problem = 0, 0.0, ""
    try:
        with closing(benchmark.measure(args)) as yielded:
            for part in yielded:
                measured, began, parts = part, began or time.monotonic(), parts + 1
    except KeyboardInterrupt:
        if parts < 2:
            raise
        problem = INTERRUPTED
    except MoaError as error:
        if parts < 2:
            raise
        problem = str(error)
    assert measured is not None, "a benchmark yields at least once"
    seconds, prints = time.monotonic() - began, measured.fingerprints
    figures, settings = measured.figures(), measured.settings
    return result_of(benchmark.name, figures, settings=settings, fingerprints=prints, seconds=seconds, problem=problem)


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse before the measurement what could not be written after it. Raises MoaError: an unknown kind of plot, a
    file that cannot be written, or one that another option names."""
    if args.plot is not None and args.plot.suffix not in _PLOTS:
        raise MoaError(f"--plot {args.plot} must end with .png, .svg or .pdf", code="unknown_format")
    for option in _OUTPUTS:
        if (path := getattr(args, option, None)) is not None:
            try:
                _check_output(option, path, args)
            except OSError as error:
                text = f"--{option} {path} cannot be written: {reason_of(error)}"
                raise MoaError(text, code="not_writable") from error


def _check_output(option: str, path: Path, args: argparse.Namespace) -> None:
    place = resolved(path)  # keeps a link to a file that is not there yet
    fresh = not place.exists()
    place.open("ab").close()
    try:
        for other, value in vars(args).items():
            for named in value if isinstance(value, list) else [value]:
                if other != option and isinstance(named, Path) and named.exists() and named.samefile(place):
                    name = other.replace("_", "-")
                    text = f"--{option} {path} is the file of --{name}, which would be lost: name another"
                    raise MoaError(text, code="same_file")
    finally:
        if fresh:
            place.unlink()
