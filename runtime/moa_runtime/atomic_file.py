"""Files that are written completely or not at all, and that only their user can read."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from moa_runtime.paths import resolved

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

#: Seconds that a writer waits for another one, and between two attempts.
_WAIT_S, _RETRY_S = 10.0, 0.02


def open_private(path: Path) -> IO[bytes]:
    """Open a file that only its user can read for writing, without truncating it; raise OSError if that fails."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o600)  # of a file that existed
        return os.fdopen(descriptor, "r+b")
    except BaseException:
        os.close(descriptor)
        raise


def lock(file: IO[bytes]) -> None:
    """Lock ``file`` until it is closed or this program ends in any way; raise OSError if another program has it."""
    if sys.platform == "win32":
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def replace_private(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace the content of a file with ``parts`` and sync it to disk. Programs that do so at once wait for each
    other, up to ten seconds. A link is followed. If it raises OSError, the old content stays, and nothing else."""
    path = resolved(path)
    unfinished = _unfinished(path)
    with _alone(unfinished) as file:
        try:
            file.truncate()
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if sys.platform == "win32":  # which cannot rename an open file
                file.close()
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()  # frees room on a full disk
            raise
    _sync_folder(path.parent)


def remove_private(path: Path) -> None:
    """Delete a file of :func:`replace_private` and the unfinished one of a killed program, or raise OSError."""
    path.unlink(missing_ok=True)
    unfinished = _unfinished(path)
    if os.path.lexists(unfinished):
        with _alone(unfinished):  # a program that is still writing keeps its file
            unfinished.unlink()


def _unfinished(path: Path) -> Path:
    # Always the same name, so that programs that were killed leave one such file at most; hidden from users.
    return path.with_name(f".{path.name}.unfinished")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[IO[bytes]]:
    """Open and lock a file; raise OSError if it cannot be made, or if another program has it for too long."""
    until = time.monotonic() + _WAIT_S
    while True:
        with open_private(path) as file:
            try:
                lock(file)
            except (BlockingIOError, PermissionError) as error:  # of POSIX and Windows, if it is locked
                if time.monotonic() >= until:
                    raise TimeoutError(errno.ETIMEDOUT, "another program is writing it", str(path)) from error
                time.sleep(_RETRY_S)
                continue
            # Another program may have renamed or deleted it since it was opened.
            if _is_named(file, path):
                yield file
                return


def _is_named(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Sync the new name to disk too, if the system can."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
