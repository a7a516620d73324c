"""``moa-bench curve`` on the command line."""

from __future__ import annotations

import argparse
from typing import Any

from moa_bench.curve import present
from moa_bench.curve.runs import read_run
from moa_bench.options import add_command
from moa_bench.output import add_output_options, check_output_options, finish
from moa_bench.result import RESULT_VERSION
from moa_runtime.errors import MoaError

_DESCRIPTION = """\
Show held-out loss and tau of training runs against the answer tokens they had learnt from, so that one can see what
more training would bring, and compare drafters at equal training. Nothing is measured: the figures are those that
moa-train writes into OUT/log.jsonl on the way.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "curve", "tau against training tokens, of one or several runs", _DESCRIPTION, run)
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN", help="folder of a run, or its log.jsonl; NAME is for the plot"
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Read, print and draw.

    Raises:
        MoaError: bad input.
    """
    check_output_options(args)
    runs: dict[str, Any] = {}
    for argument in args.runs:
        name, evaluations = read_run(argument)
        if name in runs:
            raise MoaError(f"two runs are called {name!r}: give one another name, as NAME={argument}")
        runs[name] = evaluations
    result = {"benchmark": "curve", "version": RESULT_VERSION, "partial": False, "problem": None, "runs": runs}
    return finish(result, args, present)
