"""Files that are either there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from moa_runtime.errors import MoaError


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; a reader sees what was there before or all of it.

    Raises:
        MoaError: the file cannot be written.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise MoaError(f"cannot write {path}: {error.strerror}") from error
