"""``<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>``: FunctionGemma."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.json_calls import Call, strict_json
from moa_chat.gateway.tool_formats.tool_format import ToolFormat

_NAMED = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
_PLAIN = re.compile(r"[^,}\]]*")
_KEY = re.compile(r"\s*([^:{},]+):")
_ESCAPE = "<escape>"
_DEEPEST = 32
_WHOLE = "-?(0|[1-9][0-9]{0,17})"
_PLAIN_TYPES = {
    "integer": f"/{_WHOLE}/",
    "number": f"/{_WHOLE}(\\.[0-9]{{1,18}})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
#: What schemas may say beside their type in a grammar; the first ones constrain nothing.
_SAY_NOTHING = {"title", "description", "default", "examples", "format", "$schema", "$defs", "definitions"}
_MORE = {"array": {"items"}, "object": {"properties", "required", "additionalProperties"}}
_WRITABLE_KEY = re.compile(r"[^:{},<\[\]\s]+( +[^:{},<\[\]\s]+)*")


class FunctionGemmaFormat(ToolFormat):
    """A call between two marks, whose arguments are no JSON: texts stand between ``<escape>``."""

    marks = ("<start_function_call>", "<end_function_call>", _ESCAPE)
    opening, closing = marks[:2]
    quoted = False

    def _calls(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> tuple[list[Call], str]:
        named = _NAMED.match(text)
        if not final:  # arguments become JSON when they are whole
            return [], ""
        try:
            value, end = _value(text, named.end()) if named else (None, 0)
        except ValueError:
            named = None
        if named is None or text[end:].strip():
            return [], text
        return [Call(named[1], json.dumps(value, ensure_ascii=False))], ""

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        return f"{json.dumps(f'call:{name}')} {self._rule(schema, name)} {self._mark(self.closing)}"

    @staticmethod
    def _unsupported(name: str) -> ApiError:
        text = (
            f"tools: this target writes arguments in a form of its own, for which {name!r} has no grammar: its schema "
            "may have objects, lists, texts, choices of texts, numbers and booleans, but no pattern, length or range"
        )
        return ApiError(400, text, param="tools", code="unsupported_schema")

    def _head(self, free: bool, exclusive: bool) -> list[str]:
        escape, key = self._mark(_ESCAPE), "/[^:{},<\\[\\]\\s]{1,64}/"
        lists = '"[" (any ("," any)*)? "]" | "{" members? "}"'
        rules = [f"any: {escape} /[^<]*/ {escape} | {lists} | {key}", f'members: {key} ":" any ("," {key} ":" any)*']
        return [*rules, *super()._head(free, exclusive)]

    def _rule(self, schema: Mapping[str, Any], name: str) -> str:
        """Return a schema as a grammar."""
        kind, said = schema.get("type"), schema.keys() - _SAY_NOTHING
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and said <= {"type", "enum"}:
            if all(isinstance(each, str) for each in choices):
                texts = " | ".join(json.dumps(each) for each in choices)
                return f"{self._mark(_ESCAPE)} ({texts}) {self._mark(_ESCAPE)}"
        elif not said:
            return "any"
        elif isinstance(kind, str) and said <= {"type"} | _MORE.get(kind, set()):
            if kind == "string":
                return f"{self._mark(_ESCAPE)} /[^<]*/ {self._mark(_ESCAPE)}"
            if kind == "array" and isinstance(schema.get("items", {}), Mapping):
                item = self._rule(schema.get("items", {}), name)
                return f'"[" ({item} ("," {item})*)? "]"'
            if kind == "object":
                return f'"{{" {self._members(schema, name)} "}}"'
            if kind in _PLAIN_TYPES:
                return _PLAIN_TYPES[kind]
        raise self._unsupported(name)

    def _members(self, schema: Mapping[str, Any], name: str) -> str:
        """Return the grammar of an object's members, in the order of their names, as the template has them."""
        properties, required = self._properties(schema, name)
        if not properties and schema.get("additionalProperties") is not False:
            return "members?"
        if not all(map(_WRITABLE_KEY.fullmatch, properties)):
            raise self._unsupported(name)
        rules = [(key, f"{json.dumps(f'{key}:')} {self._rule(part, name)}") for key, part in sorted(properties.items())]
        rest = [f'("," {rule}){"" if key in required else "?"}' for key, rule in rules]
        first: list[str] = []
        for index, (key, rule) in enumerate(rules):
            first.append(" ".join([rule, *rest[index + 1 :]]))
            if key in required:
                return f"({' | '.join(first)})"
        return f"({' | '.join(first)})?" if first else ""


def _value(text: str, at: int, depth: int = 0) -> tuple[Any, int]:
    """Return the value at an offset, and the offset of its end. Raises ValueError for a malformed one."""
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if text.startswith(_ESCAPE, at):
        begin = at + len(_ESCAPE)
        end = text.index(_ESCAPE, begin)
        return text[begin:end], end + len(_ESCAPE)
    if text.startswith("{", at):
        return _object(text, at + 1, depth)
    if text.startswith("[", at):
        return _list(text, at + 1, depth)
    found = _PLAIN.match(text, at)
    plain = found[0].strip() if found else ""
    try:
        return strict_json(plain), at + len(found[0] if found else "")
    except (ValueError, RecursionError):
        return plain, at + len(found[0] if found else "")


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while not text.startswith("}", at):
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError("no key")
        members[key[1].strip()], at = _value(text, key.end(), depth + 1)
        at = _after(text, at, "}")
    return members, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while not text.startswith("]", at):
        value, at = _value(text, at, depth + 1)
        values.append(value)
        at = _after(text, at, "]")
    return values, at + 1


def _after(text: str, at: int, end: str) -> int:
    """Return the offset after a comma, or at the end of the list."""
    if text.startswith(",", at):
        return at + 1
    if not text.startswith(end, at):
        raise ValueError("no comma")
    return at
