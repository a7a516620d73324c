"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, Granite 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from moa_chat.gateway.tool_formats.tool_format import ToolFormat
from moa_runtime.grammar.matcher import spaced_schema


class HermesFormat(ToolFormat):
    """A call in JSON between two marks."""

    marks = ("<tool_call>", "</tool_call>")
    opening, closing = marks
    between = "\n"

    def _call(self, name: str, schema: Mapping[str, Any]) -> str:
        begins = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        return f'{begins} %json {spaced_schema(schema)} "}}\\n" {self._mark(self.closing)}'
