"""``litellm``: see ``openai_client.py``."""

import json
import sys

import litellm
from asked import CALLING, SCHEMA, TOOL, USER, named, show


def ask(messages=USER, **options):
    own = {"api_base": sys.argv[1], "api_key": "unused", "max_tokens": 64, "temperature": 0}
    return litellm.completion("openai/target", messages=messages, **own, **options)


plain = ask().choices[0].message.content
stream = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
form = {"type": "json_schema", "json_schema": {"name": "paint", "strict": True, "schema": SCHEMA}}
answered = json.loads(ask(response_format=form).choices[0].message.content)
called = ask(**CALLING).choices[0]
[call] = called.message.tool_calls
chunks = list(ask(**CALLING, stream=True))
[streamed] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
final = ask([*USER, called.message.model_dump(), result], tools=[TOOL], tool_choice="none").choices[0].message.content
show(plain, stream, answered, named(call), named(streamed), called.finish_reason, final)
