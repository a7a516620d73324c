"""The program that makes a bundle of the built-in target and a shipped drafter, for ``moa-chat`` and ``moa-serve``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moa_export.bundle_writer import only_maker
from moa_export.progress import JsonProgress, Progress
from moa_runtime.cli_main import OptionParser, run_program
from moa_runtime.manifest import MANIFEST_FILE
from moa_runtime.paths import check_cache


def main(argv: Sequence[str] | None = None) -> int:
    """Make it, unless it is there; return the exit status as :func:`~moa_runtime.cli_main.run_program` says."""
    if argv is None:  # one that is told to end removes what it began
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = OptionParser(prog="moa-export", description="Make a bundle without torch.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="onnx", help="onnx or web")
    parser.add_argument("--drafter", help="a shipped one's name")
    parser.add_argument("--json", action="store_true", help="print progress as JSON objects")
    stopped = "stopped; nothing of the bundle stays, and a model that was not complete is fetched again"
    return run_program("moa-export", lambda: _build(parser.parse_args(argv)), stopped=stopped)


def _build(options: argparse.Namespace) -> int:
    def progress(plan: Mapping[str, float]) -> Progress:
        return JsonProgress(sys.stdout, plan=plan) if options.json else Progress(sys.stderr, plan=plan)

    check_cache()
    with only_maker(options.out, progress({})):
        if not (options.out / MANIFEST_FILE).is_file():
            from moa_export.built_bundle import build_bundle, usual_seconds  # a second of imports

            targets = (options.target,)
            build_bundle(options.out, progress(usual_seconds(targets)), targets, options.drafter)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what was built need not be freed piece by piece
