"""Files that may come from elsewhere: read only if they are regular, not too large, and inside of their folder."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import IO

from moa_runtime.paths import resolved

#: Default limit of :func:`read_checked`, for files that hold descriptions and settings.
MOST_BYTES = 1 << 26


def open_checked(path: Path, most_bytes: int | None = None, inside: Path | None = None) -> IO[bytes]:
    """Open a regular file for reading; refuse pipes, which could block, and devices, which have no end.

    Args:
        most_bytes: size limit; None for none.
        inside: folder that the file must be in, after its links.

    Raises:
        OSError: there is no such file, or it is another; ``reason_of`` says why.
    """
    try:
        if inside is not None and not resolved(path).is_relative_to(resolved(inside)):
            raise OSError(errno.EXDEV, "it is a link out of its folder", str(path))
        kind = path.stat().st_mode  # before it is opened: opening a device may already do something
    except ValueError as error:
        raise OSError(errno.EINVAL, "it has no valid name", str(path)) from error
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # replaced meanwhile
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        if most_bytes is not None and found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {most_bytes}", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_checked(path: Path, most_bytes: int = MOST_BYTES, inside: Path | None = None) -> bytes:
    """Return the content of a file, see :func:`open_checked`."""
    with open_checked(path, most_bytes, inside) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_checked_text(path: Path, most_bytes: int = MOST_BYTES, inside: Path | None = None) -> str:
    """Return the content of a UTF-8 file, see :func:`read_checked`; raise UnicodeDecodeError for other
    bytes. Lines end in a newline alone."""
    return read_checked(path, most_bytes, inside).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, hexadecimal, read in blocks; raise OSError."""
    with open_checked(path) as file:
        return digest_of(file)


def digest_of(file: IO[bytes]) -> str:
    """Return the SHA-256 of the rest of a file, hexadecimal, read in blocks; raise OSError."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
