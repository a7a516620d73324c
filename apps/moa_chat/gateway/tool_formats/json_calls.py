"""Read calls that are JSON objects, ``{"name": ..., "arguments": {...}}``, one after the other or in a list."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

#: A call up to its arguments, which Llama names ``parameters``.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_BETWEEN = re.compile(r"[\s,;\[\]]*")
_DECODER = json.JSONDecoder()
_HALF = re.compile("[\ud800-\udfff]")


class Call(NamedTuple):
    """A call of a tool; ``arguments`` is JSON whose end may still be missing."""

    name: str
    arguments: str


def read_calls(text: str, *, final: bool) -> tuple[list[Call], str]:
    """Read calls from the beginning of a text.

    Args:
        final: whether the text is whole. If not, more text only adds calls and arguments to those returned.

    Returns:
        the calls, and the rest of a text that is none; empty if there is none, or if the rest may become a call.
    """
    calls: list[Call] = []
    at = 0
    while (at := _matched(text, at)) < len(text):
        head = _HEAD.match(text, at)
        value, end = _decoded(text, at)
        if end:
            call = _call(value, *(_decoded(text, head.end()) if head else (None, 0)), text, head)
            if call is None:
                return calls, text[at:]
            calls.append(call)
            at = end
            continue
        if head is None:
            return calls, text[at:] if final else ""
        name, _ = _decoded(text, head.start(1))
        if not isinstance(name, str):  # with an escape that JSON does not have
            return calls, text[at:]
        begun = text[head.end() :]
        whole = _decoded(begun, 0)[1] if begun.startswith("{") else 0
        if begun.startswith("{") or final:
            calls.append(Call(name, begun[:whole] if whole else begun.rstrip()))
        break
    return calls, ""


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError, also for what Python alone reads and
    writes: ``NaN``, and numbers that are infinite."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


def escaped(text: str) -> str:
    """Return a text with halves of characters, which JSON can spell and UTF-8 cannot, spelled again."""
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _matched(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at an offset and the offset of its end, 0 if it has none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, 0


def _call(value: Any, arguments: Any, end: int, text: str, head: re.Match[str] | None) -> Call | None:
    """Return the call that a whole object is; None if it is none. Its arguments stay as they are written."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if head is None:
        arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON within a text
        return Call(value["name"], arguments)
    if arguments is None:
        return Call(value["name"], "{}")
    return Call(value["name"], text[head.end() : end] if head else json.dumps(arguments, ensure_ascii=False))
