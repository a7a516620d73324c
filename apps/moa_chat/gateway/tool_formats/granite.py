"""``<|tool_call|>[{"name": ..., "arguments": {...}}]``: Granite 3."""

from __future__ import annotations

from moa_chat.gateway.tool_formats.tool_format import ToolFormat


class GraniteFormat(ToolFormat):
    """A list of calls in JSON after one mark."""

    marks = ("<|tool_call|>",)
    opening = marks[0]
    listed = True
    between = ", "
    other_openings = ("<tool_call>",)  # as Granite 3.1 writes it
