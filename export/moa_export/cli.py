"""``moa-export``: turn a drafter and its target into a bundle for devices, or look at one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from moa_export import bundle_commands, export_command
from moa_export.datastore_command import datastore
from moa_runtime.cli_main import run_program

_EPILOG = """\
commands:
  moa-export inspect BUNDLE    what it holds, and how it was checked
  moa-export verify BUNDLE     check its files, and compare its graphs with PyTorch again
  moa-export diff A B          what differs between two bundles
  moa-export example BUNDLE    three steps in numbers, to check a port against
  moa-export datastore FILES   make a datastore of texts that answers may repeat, for moa-chat --datastore
"""


_COMMANDS = {**bundle_commands.COMMANDS, "datastore": datastore}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 1 for a check that failed (or bundles that differ), else as
    :func:`~moa_runtime.cli_main.run_program` says."""
    if argv is None:  # a program of its own: one that is told to end removes what it began
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    words = list(sys.argv[1:] if argv is None else argv)
    return run_program("moa-export", lambda: _run(words), stopped="interrupted, nothing was written")


def _run(words: list[str]) -> int:
    command = _COMMANDS.get(words[0]) if words else None
    if command is not None:
        return command(words[1:])
    parser = argparse.ArgumentParser(
        prog="moa-export",
        description="Turn a drafter and its target into a bundle for devices, and prove that nothing was lost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export_command.add_options(parser)
    return export_command.run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
