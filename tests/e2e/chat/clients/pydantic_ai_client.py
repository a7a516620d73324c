"""``pydantic-ai``: see ``openai_client.py``. Its agents call a tool to return an object."""

import asyncio
import json
import sys
from typing import Literal

from asked import QUESTION
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("target", provider=OpenAIProvider(base_url=sys.argv[1], api_key="unused"))
settings = {"max_tokens": 64, "temperature": 0, "parallel_tool_calls": False}


class Paint(BaseModel):
    colour: Literal["red", "blue"]


async def main() -> dict:
    agent = Agent(model, model_settings=settings)
    async with agent.run_stream(QUESTION) as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True)]
    answered = await Agent(model, output_type=NativeOutput(Paint), model_settings=settings).run(QUESTION)
    painter = Agent(model, output_type=ToolOutput(Paint, name="paint"), model_settings=settings)
    called = await painter.run(QUESTION)
    async with painter.run_stream(QUESTION) as streaming:
        streamed = await streaming.get_output()
    final = await agent.run(QUESTION, message_history=called.all_messages())
    return {
        "plain": (await agent.run(QUESTION)).output,
        "stream": "".join(pieces),
        "object": answered.output.model_dump(),
        "call": ["paint", called.output.model_dump()],
        "streamed_call": ["paint", streamed.model_dump()],
        "reason": "tool_calls",
        "final": final.output,
    }


print(json.dumps(asyncio.run(main())))
