"""Errors that every command line shows as a sentence instead of a traceback."""

from __future__ import annotations

import json
from typing import Any


def printable(text: str) -> str:
    """Escape the control characters of a text from elsewhere, which could command a terminal, and ends of lines."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class MoaError(Exception):
    """Something a user can cause and mend: what was wrong, what was expected, what to do.

    Args:
        text: one sentence: what was wrong, what was expected, what to do. It may quote a path, a peer or a file, so it
            is made :func:`printable`, one line.
        code: a word by which programs and tests tell the case, such as ``file_missing``.
    """

    #: Exit status of a command line that ends with this error.
    exit_status = 2

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(printable(text))
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross processes; an exception's own way would call the class with the text alone.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ChatError(MoaError):
    """An answer that cannot continue: the verifier refused it, or the conversation does not fit."""


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
    if isinstance(error, TimeoutError) and not error.strerror:
        return "nothing came in time"
    return (error.strerror or "the system refuses it").lower()


def json_problem(error: ValueError | RecursionError) -> str:
    """Return why a text is no JSON, without Python's advice about its own limits."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    known = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
    return str(error) if known else "a number in it has too many digits"
