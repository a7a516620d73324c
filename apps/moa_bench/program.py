"""The entry of ``moa-bench``, which installations without the extra have, too."""

from __future__ import annotations

import argparse

from moa_runtime.cli_main import add_version, run_program
from moa_runtime.optional_deps import require_extra


def main() -> int:
    """Run the program; return its exit status, 2 with a sentence if packages are missing."""

    parser = argparse.ArgumentParser(prog="moa-bench", add_help=False, allow_abbrev=False)
    add_version(parser)
    parser.parse_known_args()

    def check() -> int:
        require_extra("bench", "moa-bench")
        return 0

    if status := run_program("moa-bench", check):
        return status
    from moa_bench.cli import main as run  # late: it imports the packages

    return run()
