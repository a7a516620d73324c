"""``moa-bench report`` on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from moa_bench.options import add_command, questions_of
from moa_bench.output_file import check_output_file
from moa_bench.report.contents import read_contents
from moa_bench.report.files import write_atomically
from moa_bench.report.page import render
from moa_bench.report.runs import measure_missing
from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra

_DESCRIPTION = """\
Show results as one HTML page: tables, plots, the machine, versions and fingerprints.

DIR holds results, one a file, as the benchmarks print them:

  moa-bench accept --questions questions.jsonl --json > DIR/accept.json
  moa-bench report DIR

The page refers to nothing outside itself: it can be opened without a network, mailed, or put anywhere.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "report", "all results as one HTML page", _DESCRIPTION, run)
    parser.add_argument("folder", type=Path, metavar="DIR", help="holds the results, *.json")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON object about the page")
    measuring = parser.add_argument_group("measuring first")
    measuring.add_argument(
        "--run",
        dest="measuring",  # "run" is the command's function
        action="store_true",
        help="first run, in a small way, every benchmark that DIR has no result of; needs --questions and --limit",
    )
    measuring.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines in the format of Spec-Bench")
    measuring.add_argument("--limit", type=int, metavar="N", help="only the first N questions")


def run(args: argparse.Namespace) -> int:
    """Measure if asked to, and write the page.

    Returns:
        exit status: 0; 1 if a benchmark left no result (the page is written nevertheless); 130 after an
        interruption.

    Raises:
        MoaError: bad input, or no results.
    """
    require_extra("bench", "moa-bench report")
    out = args.out or args.folder / "report.html"
    if out.suffix == ".json":
        raise MoaError(f"--out {out}: results end with .json, and a page is none; let it end with .html")
    check_output_file("out", args)
    failed: list[str] = []
    if args.measuring:
        _prepare_measuring(args)
        try:
            failed = measure_missing(args.folder, args.questions, args.limit)
        except KeyboardInterrupt:
            _warn(f"interrupted: what was measured is in {args.folder}, and --run goes on with the rest")
            return 130
    elif args.questions is not None or args.limit is not None:
        raise MoaError("--questions and --limit are for measuring: give --run too, or leave them out")
    for name in failed:
        _warn(f"{name} left no result: see its message above")
    contents = read_contents(args.folder)
    for file in contents.left_out:
        _warn(f"{file.name} is left out: {file.reason}")
    if not contents.sections:
        raise MoaError(
            f"there are no results in {args.folder}: make one with moa-bench accept --questions FILE --json > "
            f"{args.folder / 'accept.json'}"
        )
    write_atomically(out, render(contents))
    if args.json:
        print(json.dumps({"page": str(out), **contents.as_dict(), "failed": failed}))
    else:
        print(f"{out}: {', '.join(section.file for section in contents.sections)}")
    return 1 if failed else 0


def _prepare_measuring(args: argparse.Namespace) -> None:
    """Refuse once what every benchmark would refuse, and make the folder.

    Raises:
        MoaError: bad questions, or the folder cannot be made.
    """
    if args.questions is None or args.limit is None:
        raise MoaError("--run needs --questions FILE and --limit N")
    questions_of(args)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoaError(f"cannot make the folder {args.folder}: {error.strerror}") from error


def _warn(text: str) -> None:
    print(f"moa-bench report: {text}", file=sys.stderr)
