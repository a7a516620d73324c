"""Conversations as files."""

from __future__ import annotations

import json

from moa_chat.transcript import as_json, as_markdown

MESSAGES = [
    {"role": "user", "content": "Name a colour.\n"},
    {"role": "assistant", "content": "**Ocker**, häufig 🎨:\n\n```python\nx = 1\n```"},
]


def test_markdown_keeps_the_content_as_it_is():
    assert as_markdown("Colours\nand more", MESSAGES) == (
        "# Colours and more\n\n## You\n\nName a colour.\n\n## Assistant\n\n"
        "**Ocker**, häufig 🎨:\n\n```python\nx = 1\n```\n"
    )


def test_an_unknown_role_is_named():
    assert "## Tool\n\n42" in as_markdown("T", [{"role": "tool", "content": "42"}])


def test_json_holds_the_same_messages_and_nothing_else():
    stored = [{**message, "origin": "drafted"} for message in MESSAGES]
    text = as_json("Colours", stored)
    assert json.loads(text) == {"title": "Colours", "messages": MESSAGES}
    assert "häufig 🎨" in text
