"""Files that are written whole or not at all, and that only their user can read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO


def open_private(path: Path) -> IO[bytes]:
    """Open for writing a file that only its user can read, without truncating it.

    Raises:
        OSError: it can be neither opened nor made.
    """
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o600
    )
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)  # of one that was there already
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def replace_private(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Put ``parts``, one behind the other, in the place of what was in the file; it has reached the disk when this
    returns.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    # One name, so that programs that were killed leave one such file at most.
    unfinished = path.with_name(f"{path.name}.new")
    with open_private(unfinished) as file:
        file.truncate()
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The new name reaches the disk too, where the system can promise that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
