"""``{"name": ..., "parameters": {...}}`` alone or after ``<|python_tag|>``: Llama 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moa_chat.gateway.tool_formats.json_calls import read_calls
from moa_chat.gateway.tool_formats.tool_format import Parsed, ToolFormat
from moa_runtime.tokens import open_length


class Llama3Format(ToolFormat):
    """An answer that is a call, in JSON, and nothing else."""

    marks = ("<|python_tag|>",)
    single = True
    arguments = "parameters"
    tail = "/([^{](.|\\n)*)?/"

    @classmethod
    def known_by(cls, source: str) -> bool:
        return "<|python_tag|>" in source or '"parameters": ' in source

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> Parsed:
        [mark] = self.marks
        before, marked, after = text.partition(mark)
        if not marked and not before.lstrip().startswith("{"):
            return Parsed(text if final else before[: len(before) - open_length(before, (mark,))].rstrip(), [])
        body = after if marked else before
        calls, rest = read_calls(body, final=final)
        # JSON without the mark may be an answer, too.
        if not marked and (rest or (calls and calls[0].name not in schemas)):
            return Parsed(text if final else text.rstrip(), [])
        if marked and rest and not calls:
            return Parsed(text, [])
        return Parsed(before.rstrip() if marked else "", calls)

    def _head(self, free: bool, exclusive: bool) -> list[str]:
        return [f"head: {'' if exclusive else self._mark(self.marks[0])}"]
