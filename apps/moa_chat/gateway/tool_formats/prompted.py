"""Tools for a target whose chat template knows none: they stand in the system prompt, in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moa_chat.gateway.tool_formats.smollm3 import SmolLM3Format
from moa_runtime.chat_template import Message

_PROMPT = """You can call functions. Their descriptions:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


class PromptedFormat(SmolLM3Format):
    """Tools stand in the system prompt, calls in the text of an answer, and results in a user's turn."""

    @classmethod
    def known_by(cls, source: str) -> bool:
        return True

    def templated(self, tools: Sequence[Message]) -> None:
        return None

    def turns(self, turns: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for turn in super().turns(turns, tools):
            if turn["role"] != "tool":
                found.append(turn)
                continue
            text = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "results": True})
        for turn in found:
            turn.pop("results", None)
        if tools:
            prompt = _PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
            begins = found[0]["content"] if found[0]["role"] == "system" else ""
            rest = found[1:] if begins else found
            found = [{"role": "system", "content": "\n\n".join(filter(None, [begins, prompt]))}, *rest]
        return found
