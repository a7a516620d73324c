"""``langchain-openai``: see ``openai_client.py``."""

import sys

from asked import CALLING, QUESTION, SCHEMA, TOOL, show
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=sys.argv[1], api_key="unused", model="target", max_tokens=64, temperature=0, max_retries=0)
plain = model.invoke(QUESTION).content
stream = "".join(chunk.content for chunk in model.stream(QUESTION))
answered = model.with_structured_output({"title": "paint", **SCHEMA}, method="json_schema").invoke(QUESTION)
calling = model.bind_tools(**CALLING)
called = calling.invoke(QUESTION)
[call] = called.tool_calls
streamed = None
for chunk in calling.stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
result = ToolMessage("done", tool_call_id=call["id"])
final = model.bind_tools([TOOL], tool_choice="none").invoke([HumanMessage(QUESTION), called, result]).content
called_in, streamed_in = ([each["name"], each["args"]] for each in (call, streamed.tool_calls[0]))
show(plain, stream, answered, called_in, streamed_in, called.response_metadata["finish_reason"], final)
