"""A chat in your own program. Cut the network while it answers: the device writes on, and the target checks it later.

python embed_minimal.py BUNDLE ws://HOST:8765 "Why is the sky blue?"
"""

import asyncio
import os
import sys

from moa_runtime import AnswerFinished, AnswerUpdate, Bundle, Chat, Endpoint, LinkChanged, MoaError


async def main(folder: str, server: str, question: str) -> None:
    endpoint = Endpoint(server, os.environ.get("MOA_TOKEN", ""))
    async with await Chat.connect(Bundle.open(folder), endpoint) as chat:
        async for event in chat.send(question, max_new_tokens=200):
            if isinstance(event, LinkChanged):
                print(f"[{event.status.value}] {event.detail}", file=sys.stderr)
            elif isinstance(event, AnswerUpdate):  # event.tentative is what the target has not confirmed yet
                print(event.text, end="", flush=True)
            elif isinstance(event, AnswerFinished):
                print()


if len(sys.argv) != 4:
    sys.exit(__doc__)
try:
    asyncio.run(main(*sys.argv[1:]))
except MoaError as error:
    sys.exit(f"error: {error}")
