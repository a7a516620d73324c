"""``moa-export``: turn a drafter and its target into a bundle for devices, or look at one."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from moa_export import bundle_commands, export_command
from moa_export.datastore_command import datastore
from moa_export.errors import ParityError
from moa_runtime.errors import MoaError, refused_paths

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
    """Returns the exit status: 0, 2 for bad input, 1 for a check that failed (or bundles that differ)."""
    if argv is None:  # a program of its own: one that is told to end removes what it began
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    words = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(words[0]) if words else None
    try:
        if command is not None:
            with refused_paths():
                return command(words[1:])
        parser = argparse.ArgumentParser(
            prog="moa-export",
            description="Turn a drafter and its target into a bundle for devices, and prove that nothing was lost.",
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        export_command.add_options(parser)
        options = parser.parse_args(words)
        with refused_paths():
            return export_command.run(options)
    except MoaError as error:
        print(f"moa-export: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, ParityError) else 2
    except KeyboardInterrupt:
        print("moa-export: interrupted, nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
