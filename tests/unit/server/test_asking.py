"""A busy verifier asks clients to draft, on a toy target and a virtual clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.memory_link import ClientEnd
from support.server.in_memory import CLIENT, SETTINGS, Served, receive, send, with_served
from support.server.raw import prompt

PROMPT = [7, 8, 9]


async def streaming(served: Served, round_trip_us: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session whose answer is pushed."""
    end = await served.link.connect("")
    await send(end, CLIENT.hello(row_encoding=row_encoding))
    await receive(end)
    await send(end, prompt(1, 0, PROMPT, most=800))
    await send(
        end, wire.ClientMessage(credit=wire.Credit(epoch=1, position=800, serial=1, round_trip_us=round_trip_us))
    )
    return end


async def asked_to_draft(end: ClientEnd) -> bool:
    """By the newest of what has come."""
    await asyncio.sleep(1)
    verdicts = [wire.ServerMessage.FromString(frame).verdict for frame in end.down.take_all()]
    return [verdict for verdict in verdicts if verdict.tokens][-1].drafts_wanted


@with_served(replace(SETTINGS, ask_from=2))
async def test_clients_are_asked_to_draft_where_many_stream_those_with_short_round_trips_first(served: Served):
    ends = [await streaming(served, trip) for trip in (30_000, 5_000)]
    assert [await asked_to_draft(end) for end in ends] == [False, False]
    ends += [await streaming(served, trip) for trip in (90_000, 1_000, 60_000)]
    assert [await asked_to_draft(end) for end in ends] == [True, True, False, True, False]
    await send(ends[3], wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0)))
    assert [await asked_to_draft(end) for end in ends[:3]] == [True, True, False]


@with_served(replace(SETTINGS, ask_from=1))
async def test_who_cannot_draft_or_does_not_say_how_far_it_is_is_not_asked(served: Served):
    ends = [await streaming(served, 1_000, wire.ROW_ENCODING_UNSPECIFIED), await streaming(served, 0)]
    ends.append(await streaming(served, 50_000))
    assert [await asked_to_draft(end) for end in ends] == [False, False, True]
