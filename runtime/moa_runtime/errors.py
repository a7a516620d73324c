"""Errors that every command line shows as a sentence instead of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class MoaError(Exception):
    """Something a user can cause and mend: what was wrong, what was expected, what to do."""


class ChatError(MoaError):
    """An answer that cannot go on: the verifier refused it, or the conversation does not fit."""


class ContextFullError(ChatError):
    """The conversation does not fit into the target's context."""


def reason_of(error: OSError) -> str:
    """Why the system refused a path, in words that need no knowledge of system calls."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a part of the name is a file, not a folder"
    if isinstance(error, IsADirectoryError):
        return "it is a folder, not a file"
    if isinstance(error, FileNotFoundError):
        return "there is no such file or folder"
    if isinstance(error, PermissionError):
        return "permission denied"
    return (error.strerror or "the system refuses it").lower()


@contextlib.contextmanager
def refused_paths() -> Iterator[None]:
    """For the whole of a command line: what the system refuses about any file or folder is a sentence too.

    Raises:
        MoaError: the path and the reason.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:  # of no path: a fault of ours, or a pipe whose reader left
            raise
        raise MoaError(
            f"{error.filename} cannot be used: {reason_of(error)}; give another path, or make this one usable"
        ) from error
