"""A chat's file: written whole or not at all, private to its user, and of one program at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moa_runtime.atomic_file import lock, open_private, replace_private
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.paths import expanded, free_name


class StoreError(MoaError):
    """A chat's file that another program has, or that cannot be read or written."""


class ChatStore:
    """One JSON file. Beside it lies ``NAME.lock``, which the system unlocks when its program ends, however it ends.

    Only :meth:`write` may be called in another thread.

    Args:
        path: the file. Its folder is made, for its user alone, where there is none.

    Raises:
        StoreError: another program has the file, it is a folder, or nothing can be written beside it.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self.path = expanded(path).resolve()  # through links, so that a chat has one lock
            if self.path.is_dir():
                raise StoreError(f"a chat is kept in a file, and {self.path} is a folder: name a file in it")
            if self.path.exists() and not self.path.is_file():  # a pipe would be waited for
                raise StoreError(f"a chat is kept in a file, and {self.path} is none: name another")
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open_private(self.path.with_name(f"{self.path.name}.lock"))
        except OSError as error:
            raise StoreError(f"the chat cannot be kept in {path}: {reason_of(error)}") from error
        try:
            lock(self._lock)
        except OSError as error:
            self._lock.close()
            raise StoreError(
                f"the chat in {self.path} is open in another program: close it there, or keep this one in another file"
            ) from error

    def read(self) -> Any:
        """What was written last; None where nothing was.

        Raises:
            StoreError: the file cannot be read, or is broken.
        """
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the chat in {self.path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the file {self.path} is broken: it is no JSON") from error

    def write(self, content: Mapping[str, Any]) -> None:
        """Put ``content`` in the place of what was there; it has reached the disk when this returns.

        Raises:
            StoreError: it cannot be written; what was there stays.
        """
        try:
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            replace_private(self.path, [text.encode(errors="backslashreplace")])  # half a character as JSON escapes it
        except OSError as error:
            raise StoreError(f"the chat cannot be written to {self.path}: {error.strerror}") from error

    def set_aside(self) -> Path:
        """Rename the file, which is of no use here, and return its new name.

        Raises:
            StoreError: it cannot be renamed.
        """
        aside = free_name(self.path, "set-aside")
        try:
            return self.path.rename(aside)
        except OSError as error:
            raise StoreError(f"the file {self.path} cannot be renamed to {aside.name}: {error.strerror}") from error

    def close(self) -> None:
        """Let other programs have the file."""
        self._lock.close()
