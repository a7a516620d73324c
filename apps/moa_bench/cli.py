"""``moa-bench``: measure what users feel."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moa_bench.benchmarks import BENCHMARKS, command_of
from moa_bench.forecast import command as forecast_command
from moa_bench.outage import command as outage_command
from moa_bench.placement import command as placement_command
from moa_bench.report import command as report_command
from moa_bench.shapes import command as shapes_command
from moa_runtime.cli_main import run_program
from moa_runtime.cpus import too_many_threads

_STOPPED = "stopped before anything was measured"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moa-bench",
        description="Benchmarks of drafting on a device for a target on a server.",
        epilog="moa-bench COMMAND --help explains one of them.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for benchmark in BENCHMARKS:
        command_of(benchmark).add_parser(commands)
    shapes_command.add_parser(commands)
    placement_command.add_parser(commands)
    forecast_command.add_parser(commands)
    outage_command.add_parser(commands)
    report_command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the benchmark, or as :func:`~moa_runtime.cli_main.run_program` says."""
    return run_program("moa-bench", lambda: _run(build_parser().parse_args(argv)), stopped=_STOPPED)


def _run(args: argparse.Namespace) -> int:
    if warning := too_many_threads(getattr(args, "threads", None)):
        print(f"moa-bench: {warning}", file=sys.stderr)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
