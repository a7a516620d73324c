"""Start and end of every command line: errors that a user can mend are one sentence and an exit status."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from moa_runtime.errors import MoaError, printable, reason_of


def run_program(
    name: str, work: Callable[[], int], *, stopped: str = "stopped", complain: Callable[[str], None] | None = None
) -> int:
    """Run ``work`` and return its exit status. If it is ended by an error, return that of the :class:`MoaError`, 2 if
    the system refused a path or had no room for the output, 130 after Ctrl-C, 141 if the reader of stdout has left.

    Args:
        name: the program's, in front of every sentence on stderr; the error's code follows it in brackets.
        stopped: what is said after Ctrl-C.
        complain: takes errors instead of stderr.

    Raises:
        OSError: of no path, which is a fault of ours.
    """

    def say(text: str, code: str) -> None:
        text = printable(f"{text}  [{code}]")
        if complain is not None:
            complain(text)
        else:
            print(f"{name}: error: {text}", file=sys.stderr)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a path need not be UTF-8
    try:
        status = work()
        if sys.stdout is not None:  # as in a program with a window alone
            sys.stdout.flush()  # what fails now would be a traceback when Python ends
        return status
    except MoaError as error:
        say(str(error), error.code)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"{name}: {stopped}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is not None:
            code = "path_refused"
            reason = f"{error.filename} cannot be used: {reason_of(error)}; give another path, or make this one usable"
        elif error.errno == errno.ENOSPC:
            _drop_output()
            code = "disk_full"
            reason = "the output cannot be written whole: no space left on its device; make room, or send it elsewhere"
        else:
            raise
        say(reason, code)
        return 2


def _drop_output() -> None:
    """Python flushes stdout once more when it ends, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class UsageError(MoaError):
    """Options that are invalid or exclude each other."""


class OptionParser(argparse.ArgumentParser):
    """Raises an error of one sentence instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)", code="bad_option")


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the program's name and the version of moa-edge."""
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('moa-edge')}")


def own_program(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module's ``main`` with this Python. Ctrl-C while it is imported ends it, too,
    without a traceback: the program that started it says that it was stopped."""
    lines = "import sys", "try:", f"    from {module} import main", "except KeyboardInterrupt:", "    sys.exit(130)"
    start = "\n".join([*lines, "sys.exit(main())"])
    # Not the console script, which may be missing or not on the path.
    return [sys.executable, "-c", start, *arguments]
