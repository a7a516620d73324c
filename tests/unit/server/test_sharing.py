"""Verdicts say how many conversations share the target, on a toy target and a virtual clock."""

from __future__ import annotations

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ClientEnd
from support.server.in_memory import CLIENT, Served, receive, send, verdict_of, with_served
from support.server.raw import prompt

PROMPT = [7, 8, 9]


async def asked(served: Served) -> ClientEnd:
    """A session with a question whose answer is two tokens."""
    end = await served.link.connect("")
    await send(end, CLIENT.hello(), prompt(1, 0, PROMPT, most=2))
    await receive(end)
    return end


@with_served()
async def test_a_verdict_says_how_many_conversations_share_the_target(served: Served):
    ends = []
    for count in (1, 2, 3):
        ends.append(await asked(served))
        assert (await verdict_of(ends[-1])).sharing == count == served.verifier.worker.serving
    for count, end in zip((3, 2, 1), ends, strict=True):  # each answer ends
        await send(end, wire.ClientMessage(draft=wire.Draft(epoch=1, base_len=len(PROMPT) + 1)))
        verdict = await verdict_of(end)
        assert verdict.finish and verdict.sharing == count
