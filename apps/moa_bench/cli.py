"""``moa-bench``: measure speculative decoding between a device and a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moa_bench.accept import Accept
from moa_bench.benchmark import Benchmark
from moa_bench.device import Device
from moa_bench.network import Network
from moa_bench.offline import Offline
from moa_bench.runner import add_output_options, run
from moa_bench.server import Server
from moa_bench.simulate import Simulate
from moa_runtime.cli_main import OptionParser, add_version, run_program
from moa_runtime.options import too_many_threads

BENCHMARKS: tuple[Benchmark, ...] = (Accept(), Network(), Offline(), Device(), Server(), Simulate())


def build_parser() -> argparse.ArgumentParser:
    """Make the parser; ``benchmark`` of the parsed arguments is the chosen one."""
    parser = OptionParser(
        prog="moa-bench",
        description="Benchmarks of drafting on a device for a target on a server.",
        epilog="moa-bench COMMAND --help explains one of them.",
    )
    add_version(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for benchmark in BENCHMARKS:
        command = commands.add_parser(
            benchmark.name,
            help=benchmark.summary,
            description=benchmark.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_options(command)
        add_output_options(command)
        command.set_defaults(benchmark=benchmark)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, see :func:`moa_bench.runner.run` and :func:`moa_runtime.cli_main.run_program`."""
    return run_program(
        "moa-bench", lambda: _run(build_parser().parse_args(argv)), stopped="stopped before anything was measured"
    )


def _run(args: argparse.Namespace) -> int:
    if warning := too_many_threads(getattr(args, "threads", None)):
        print(f"moa-bench: {warning}", file=sys.stderr)
    return run(args.benchmark, args)


if __name__ == "__main__":
    sys.exit(main())
