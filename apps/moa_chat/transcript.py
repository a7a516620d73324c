"""A conversation as a file: Markdown to read, JSON to go on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_NAMES = {"system": "System", "user": "You", "assistant": "Assistant"}


def as_markdown(title: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as a Markdown document.

    Args:
        title: becomes the heading; line breaks in it become spaces.
        messages: ``{"role": ..., "content": ...}`` each; the content is Markdown already and stays as it is.
    """
    parts = [f"# {' '.join(title.split())}"]
    for message in messages:
        role = message["role"]
        parts.append(f"## {_NAMES.get(role, role.capitalize())}\n\n{message['content'].strip()}")
    return "\n\n".join(parts) + "\n"


def as_json(title: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The conversation as JSON: the title, and the messages as an OpenAI-compatible server takes them."""
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    return json.dumps({"title": title, "messages": turns}, ensure_ascii=False, indent=2) + "\n"
