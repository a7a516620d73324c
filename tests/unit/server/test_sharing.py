"""What verdicts tell of a busy verifier: how many conversations share the target, and that clients should draft."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ClientEnd
from support.server.in_memory import CLIENT, SETTINGS, Served, receive, send, verdict_of, with_served
from support.server.raw import prompt

PROMPT = [7, 8, 9]


async def asked(served: Served, most: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session with a question whose answer has at most so many tokens."""
    end = await served.link.connect("")
    await send(end, CLIENT.hello(row_encoding=row_encoding), prompt(1, 0, PROMPT, most=most))
    await receive(end)
    return end


@with_served()
async def test_a_verdict_tells_how_many_conversations_share_the_target(served: Served):
    ends = []
    for count in (1, 2, 3):
        ends.append(await asked(served, 2))
        assert (await verdict_of(ends[-1])).sharing == count == served.verifier.worker.serving
    for count, end in zip((3, 2, 1), ends, strict=True):  # each answer ends
        await send(end, wire.ClientMessage(draft=wire.Draft(epoch=1, base_len=len(PROMPT) + 1)))
        verdict = await verdict_of(end)
        assert verdict.finish and verdict.sharing == count


async def streaming(served: Served, round_trip_us: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session whose answer is pushed."""
    end = await asked(served, 800, row_encoding)
    credit = wire.Credit(epoch=1, position=800, serial=1, round_trip_us=round_trip_us)
    await send(end, wire.ClientMessage(credit=credit))
    return end


async def asked_to_draft(end: ClientEnd) -> bool:
    """Whether the newest verdict asks the client to draft."""
    await asyncio.sleep(1)
    verdicts = [wire.ServerMessage.FromString(frame).verdict for frame in end.down.take_all()]
    return [verdict for verdict in verdicts if verdict.tokens][-1].drafts_wanted


@with_served(replace(SETTINGS, ask_from=2))
async def test_clients_with_short_round_trips_are_asked_to_draft_first(served: Served):
    ends = [await streaming(served, trip) for trip in (30_000, 5_000)]
    assert [await asked_to_draft(end) for end in ends] == [False, False]
    ends += [await streaming(served, trip) for trip in (90_000, 1_000, 60_000)]
    assert [await asked_to_draft(end) for end in ends] == [True, True, False, True, False]
    await send(ends[3], wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0)))
    assert [await asked_to_draft(end) for end in ends[:3]] == [True, True, False]


@with_served(replace(SETTINGS, ask_from=1))
async def test_clients_that_cannot_draft_or_tell_no_round_trip_are_not_asked(served: Served):
    ends = [await streaming(served, 1_000, wire.ROW_ENCODING_UNSPECIFIED), await streaming(served, 0)]
    ends.append(await streaming(served, 50_000))
    assert [await asked_to_draft(end) for end in ends] == [False, False, True]
