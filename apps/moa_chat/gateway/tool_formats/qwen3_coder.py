"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen 3 Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from moa_chat.gateway.errors import ApiError
from moa_chat.gateway.tool_formats.json_calls import Call, strict_json
from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_runtime.grammar.matcher import spaced_schema

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)\s*(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_END = "\n</parameter>\n"
#: What a schema of a text may say in a grammar.
_OF_TEXTS = {"type", "title", "description", "default", "examples", "format", "enum"}


class Qwen3CoderFormat(ToolFormat):
    """A call between two marks, whose arguments are texts in XML, or JSON if their schema is none of texts."""

    marks = ("<tool_call>", "</tool_call>")
    opening, closing = marks
    between = "\n"
    quoted = False

    @classmethod
    def known_by(cls, source: str) -> bool:
        return "<function=" in source and "<parameter=" in source and cls.opening in source

    def _calls(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> tuple[list[Call], str]:
        if not final:  # arguments become JSON when they are whole
            return [], ""
        function = _FUNCTION.fullmatch(text)
        if function is None:
            return [], text
        name, inside = function[1].strip(), function[2]
        properties = schemas.get(name, {}).get("properties") or {}
        found = {key.strip(): _value(value, properties.get(key.strip())) for key, value in _PARAMETER.findall(inside)}
        return [Call(name, json.dumps(found, ensure_ascii=False))], ""

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = self._properties(schema, name)
        if not properties and schema.get("additionalProperties") is not False:  # any arguments
            members = '("<parameter=" /[^>\\n]+/ ">\\n" parameter)*'
        else:
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            rules = [
                f"{json.dumps(f'<parameter={key}>' + chr(10))} {self._rule({**shared, **part}, name)}"
                for key, part in properties.items()
            ]
            known = zip(properties, rules, strict=True)
            members = " ".join(rule if key in required else f"({rule})?" for key, rule in known)
        begins = json.dumps(f"\n<function={name}>\n")
        return f'{begins} {members} "</function>\\n" {self._mark(self.closing)}'

    def _head(self, free: bool, exclusive: bool) -> list[str]:
        return [f"parameter[lazy]: /(.|\\n)*/ {json.dumps(_END)}", *super()._head(free, exclusive)]

    def _rule(self, schema: Mapping[str, Any], name: str) -> str:
        """Return a value as a grammar, with the end of its parameter."""
        if schema.get("type") != "string":
            return f"%json {spaced_schema(schema)} {json.dumps(_END)}"
        if not schema.keys() - {"$defs", "definitions"} <= _OF_TEXTS:
            raise self._unsupported(name)
        if isinstance(schema.get("enum"), list):
            return f"({' | '.join(json.dumps(str(each)) for each in schema['enum'])}) {json.dumps(_END)}"
        return "parameter"

    @staticmethod
    def _unsupported(name: str) -> ApiError:
        text = (
            f"tools: this target writes texts without quotes, for which {name!r} has no grammar: schemas of its texts "
            "may have an enum, but no pattern or length"
        )
        return ApiError(400, text, param="tools", code="unsupported_schema")


def _value(text: str, schema: Any) -> Any:
    """Return the value of a parameter: the text itself if the schema is one of texts, else JSON if it is some."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return strict_json(text.lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
