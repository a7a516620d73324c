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
    tail = "/\\s*([^{\\s](.|\\n)*)?/"  # a call may have space before it

    @classmethod
    def known_by(cls, source: str) -> bool:
        return "<|python_tag|>" in source or '"parameters": ' in source

    def read(self, text: str, schemas: Mapping[str, Mapping[str, Any]], *, final: bool) -> Parsed:
        [mark] = self.marks
        before, marked, after = text.partition(mark)
        if not marked and not before.lstrip().startswith("{"):
            return Parsed(text if final else before[: len(before) - open_length(before, (mark,))].rstrip(), [])
        # JSON without the mark may be an answer, too.
        alone, rest = read_calls(text, final=final) if before.lstrip().startswith("{") else ([], before)
        if not rest and not alone and not final:
            return Parsed("", [])
        if alone and alone[0].name in schemas:
            return Parsed("", alone)
        if not marked:
            return Parsed(text if final else before[: len(before) - open_length(before, (mark,))].rstrip(), [])
        calls, rest = read_calls(after, final=final)
        if rest and not calls:
            return Parsed(text, [])
        return Parsed(before.rstrip(), calls)

    def _head(self, free: bool, exclusive: bool) -> list[str]:
        return [f"head: {'' if exclusive else self._mark(self.marks[0])}"]
