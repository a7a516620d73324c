"""SmolLM 3's form, which is Hermes', with a template that knows tools as ``xml_tools`` and no calls in the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moa_chat.gateway.tool_formats.hermes import HermesFormat
from moa_runtime.chat_template import Message


class SmolLM3Format(HermesFormat):
    """Calls of earlier answers stand in their text."""

    @classmethod
    def known_by(cls, source: str) -> bool:
        return "xml_tools" in source

    def turns(self, turns: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._with_calls(turn) for turn in turns]

    def _with_calls(self, turn: dict[str, Any]) -> dict[str, Any]:
        calls = turn.get("tool_calls")
        if not calls:
            return turn
        text = "\n".join(filter(None, [turn["content"], self.write(calls)]))
        return {"role": turn["role"], "content": text}
