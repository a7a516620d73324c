"""What every client asks for, and how it shows what it got. The target of the tests is random: only a grammar makes it
call a tool."""

import json
from typing import Any

QUESTION = "Paint it."
USER = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}}
#: A target without sense would call a tool for ever.
CALLING = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def named(call: Any) -> list:
    """The name of a call's function, and its arguments."""
    return [call.function.name, json.loads(call.function.arguments)]


def show(plain: str, stream: str, answered: Any, call: list, streamed_call: list, reason: str, final: str) -> None:
    """Print what came as JSON."""
    found = {"plain": plain, "stream": stream, "object": answered, "call": call, "streamed_call": streamed_call}
    print(json.dumps({**found, "reason": reason, "final": final}))
