"""The ``openai`` package: argument is the endpoint's URL; prints what came as JSON."""

import json
import sys

from asked import CALLING, SCHEMA, TOOL, USER, named, show
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)


def ask(messages=USER, **options):
    return client.chat.completions.create(model="target", messages=messages, max_tokens=64, temperature=0, **options)


plain = ask().choices[0].message.content
stream = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
form = {"type": "json_schema", "json_schema": {"name": "paint", "strict": True, "schema": SCHEMA}}
answered = json.loads(ask(response_format=form).choices[0].message.content)
called = ask(**CALLING).choices[0]
[call] = called.message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
final = ask([*USER, called.message, result], tools=[TOOL], tool_choice="none").choices[0].message.content
with client.chat.completions.stream(model="target", messages=USER, max_tokens=64, temperature=0, **CALLING) as events:
    [streamed] = events.get_final_completion().choices[0].message.tool_calls
show(plain, stream, answered, named(call), named(streamed), called.finish_reason, final)
