"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and ``[TOOL_CALLS]name[ARGS]{...}`` of later models: Mistral."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from moa_chat.gateway.tool_formats.json_calls import Call, read_calls
from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_runtime.chat_template import Message
from moa_runtime.grammar.matcher import spaced_schema
from moa_runtime.reasoning import Thought

_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_ID = re.compile("[a-zA-Z0-9]{9}")  # the templates refuse others


class MistralFormat(ToolFormat):
    """A list of calls in JSON after one mark, or the mark, a name and arguments for each call."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    opening = marks[0]

    def __init__(
        self, source: str, special: Mapping[str, int], thought: Callable[[bool | None], Thought] = lambda thinking: ""
    ) -> None:
        super().__init__(source, special, thought)
        self._named = "[ARGS]" in source
        self._with_id = "[CALL_ID]" in source
        self.listed = not self._named
        self.between = "" if self._named else ", "

    def call_id(self) -> str:
        return secrets.token_hex(5)[:9]

    def turns(self, turns: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
        found = []
        for turn in turns:
            turn = dict(turn)
            if "tool_call_id" in turn:
                turn["tool_call_id"] = _short_id(turn["tool_call_id"])
            if "tool_calls" in turn:
                turn["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in turn["tool_calls"]]
            found.append(turn)
        return found

    def _calls(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> tuple[list[Call], str]:
        if (named := _NAMED.match(text)) is None:
            if not final and not text.lstrip().startswith(("[{", "[ {")):
                return [], ""
            return read_calls(text, final=final)
        # The same as an object, whose end may be missing.
        begins = f'{{"name": "{named[1]}", "arguments": '
        calls, rest = read_calls(begins + text[named.end() :], final=final)
        return calls[:1], rest

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        if not self._named:
            return super()._call(name, schema)
        id_of = f"{self._mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/ " if self._with_id else ""
        return f"{json.dumps(name)} {id_of}{self._mark('[ARGS]')} %json {spaced_schema(schema)}"


def _short_id(name: str) -> str:
    """Return the id of a call as the template takes it, the same for the same name."""
    return name if _ID.fullmatch(name) else blake2b(name.encode(), digest_size=5).hexdigest()[:9]
