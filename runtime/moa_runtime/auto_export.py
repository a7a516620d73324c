"""A bundle made by a program that needs one and has none: ``moa-export`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DrafterName, drafter_option


def make_bundle(folder: Path, target: str, program: str, takes: str, drafter: DrafterName | None = None) -> None:
    """Export the built-in target and a shipped drafter, unchecked; the export's progress goes to stderr.

    Args:
        target: of ``moa-export --target``.
        program: what needs it, and ``takes`` how long it has to wait, for messages.
        drafter: which one; the default one when omitted.

    Raises:
        MoaError: the export needs packages that are not installed, or failed.
    """
    require_extra("export", f"{program} (moa-export)")
    print(f"there is no bundle at {folder} yet: exporting one ({takes})", file=sys.stderr, flush=True)
    options = ("--target", target, "--out", str(folder), *drafter_option(drafter), "--json", "--no-checks")
    command = own_program("moa_export.cli", *options)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()  # not killed: it removes what it began
        process.wait()
        raise
    if status:
        raise MoaError("the bundle could not be exported: moa-export's message above says why")


def own_program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module's ``main`` with this Python."""
    # Not `-m`, nor the console script: neither has to be there or on the path.
    return [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *arguments]
