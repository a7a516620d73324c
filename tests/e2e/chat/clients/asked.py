"""What every client asks for. The target of the tests is random: only a grammar makes it call a tool."""

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
