"""Write a conversation into a file: Markdown to read, JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from moa_chat import strings
from moa_runtime.errors import MoaError
from moa_runtime.paths import expanded

_TITLE_LENGTH = 60
_NAMES = {"system": "System", "user": "You", "assistant": "Assistant"}


def as_markdown(title: str, messages: Sequence[Mapping[str, str]], unconfirmed: Collection[int] = ()) -> str:
    """Return the conversation as a Markdown document with a heading; the content of messages stays as it is.

    Args:
        unconfirmed: indices of the answers that the target has not confirmed.
    """
    parts = [f"# {' '.join(title.split())}"]
    for index, message in enumerate(messages):
        role, note = message["role"], f" ({strings.TENTATIVE})" if index in unconfirmed else ""
        parts.append(f"## {_NAMES.get(role, role.capitalize())}{note}\n\n{message['content'].strip()}")
    return "\n\n".join(parts) + "\n"


def as_json(title: str, messages: Sequence[Mapping[str, str]], unconfirmed: Collection[int] = ()) -> str:
    """Return the conversation as JSON: the title, the messages as an OpenAI-compatible server takes them, and the
    indices of those that are ``unconfirmed``, if any are."""
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    marks = {"unconfirmed": list(unconfirmed)} if unconfirmed else {}
    return json.dumps({"title": title, "messages": turns, **marks}, ensure_ascii=False, indent=2) + "\n"


#: Writers by the ending of a file's name.
FORMATS: dict[str, Callable[[str, Sequence[Mapping[str, str]], Collection[int]], str]] = {
    ".md": as_markdown,
    ".json": as_json,
}


def file_name(title: str) -> str:
    """Make a file name of a chat's title, without an ending and without characters that file systems refuse."""
    kept = "".join(char if char.isalnum() or char in " -_" else " " for char in title)
    return " ".join(kept.split()) or "chat"


def save_conversation(
    name: str,
    messages: Sequence[Mapping[str, str]],
    may_overwrite: Callable[[Path], bool],
    unconfirmed: Collection[int] = (),
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
    title = title if len(title) <= _TITLE_LENGTH else f"{title[:_TITLE_LENGTH]}..."
    text = FORMATS[path.suffix](title, messages, unconfirmed)
    try:
        if path.exists() and not may_overwrite(path):
            return None
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoaError(f"cannot write {path}: {error.strerror}", code="cannot_write") from error
    return path
