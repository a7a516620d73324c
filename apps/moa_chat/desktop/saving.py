"""Saving a chat as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtWidgets import QFileDialog, QWidget

from moa_chat.transcript import as_json, as_markdown
from moa_runtime.errors import MoaError

_KINDS = "Markdown (*.md);;JSON (*.json)"


def ask_and_save(parent: QWidget, title: str, turns: Sequence[dict[str, str]]) -> Path | None:
    """Ask where, and write the chat there; None when the user thinks better of it.

    Raises:
        MoaError: the file cannot be written.
    """
    name, kind = QFileDialog.getSaveFileName(parent, "Save this chat", f"{_file_name(title)}.md", _KINDS)
    if not name:
        return None
    path = Path(name)
    if not path.suffix:
        path = path.with_suffix(".json" if "json" in kind else ".md")
    write = as_json if path.suffix == ".json" else as_markdown
    try:
        path.write_text(write(title, turns), encoding="utf-8")
    except OSError as error:
        raise MoaError(f"the chat could not be saved as {path}: {error.strerror}") from error
    return path


def _file_name(title: str) -> str:
    """A title without what file systems refuse."""
    kept = "".join(char if char.isalnum() or char in " -_" else " " for char in title)
    return " ".join(kept.split()) or "chat"
