"""Write a conversation into a file: Markdown to read, JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.paths import expanded

_TITLE_LENGTH = 60
_NAMES = {"system": "System", "user": "You", "assistant": "Assistant"}


def as_markdown(title: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the conversation as a Markdown document with a heading; the content of messages stays as it is."""
    parts = [f"# {' '.join(title.split())}"]
    for message in messages:
        role = message["role"]
        parts.append(f"## {_NAMES.get(role, role.capitalize())}\n\n{message['content'].strip()}")
    return "\n\n".join(parts) + "\n"


def as_json(title: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the conversation as JSON: the title, and the messages as an OpenAI-compatible server takes them."""
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    return json.dumps({"title": title, "messages": turns}, ensure_ascii=False, indent=2) + "\n"


#: Writers by the ending of a file's name.
FORMATS: dict[str, Callable[[str, Sequence[Mapping[str, str]]], str]] = {".md": as_markdown, ".json": as_json}


def file_name(title: str) -> str:
    """Make a file name of a chat's title, without an ending and without characters that file systems refuse."""
    kept = "".join(char if char.isalnum() or char in " -_" else " " for char in title)
    return " ".join(kept.split()) or "chat"


def save_conversation(
    name: str, messages: Sequence[Mapping[str, str]], may_overwrite: Callable[[Path], bool]
) -> Path | None:
    """Write the messages in the format that the ending of the name stands for, and return the file; None if it exists
    and ``may_overwrite`` says no. Raises MoaError if there is no name, no such format, or nothing to save, or the file
    cannot be written."""
    if not name:
        raise MoaError("a file name is missing: /save FILE", code="name_missing")
    if "\0" in name:
        raise MoaError("a file name has no null character: /save FILE", code="bad_name")
    path = expanded(name)
    if path.suffix not in FORMATS:
        text = f"{name!r} has no known ending: expected a file name with {' or '.join(FORMATS)}"
        raise MoaError(text, code="bad_ending")
    question = next((message["content"] for message in messages if message["role"] == "user"), None)
    if question is None:
        raise MoaError("there is nothing to save yet", code="empty")
    title = " ".join(question.split())
    text = FORMATS[path.suffix](title if len(title) <= _TITLE_LENGTH else f"{title[:_TITLE_LENGTH]}...", messages)
    try:
        if path.exists() and not may_overwrite(path):
            return None
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoaError(f"cannot write {path}: {error.strerror}", code="cannot_write") from error
    return path
