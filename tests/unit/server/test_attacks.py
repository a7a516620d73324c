"""What one client can do to the others, on a toy target and a virtual clock: steps are counted, no time is measured."""

from __future__ import annotations

import asyncio

import pytest

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.settings import Settings
from support.memory_link import ClientEnd
from support.server.in_memory import Served, receive, rows_of, send, silent, with_served
from support.server.raw import draft, prompt

LONG = 900
NARROW = Settings(max_waiting_frames=8, max_frame_bytes=1024)


# -- work that nobody waits for ----------------------------------------------------------------------

CANCEL = wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0))
BYE = wire.ClientMessage(bye=wire.Bye())


async def _go(served: Served, end: ClientEnd, token: str, how: str) -> None:
    if how == "cut":
        served.link.cut()
    elif how == "replaced":
        await served.session(token)
    else:
        await send(end, {"cancel": CANCEL, "bye": BYE, "another prompt": prompt(2, 0, [9] * 5)}[how])


@pytest.mark.parametrize("how", ["cut", "replaced", "cancel", "bye", "another prompt"])
@with_served()
async def test_the_work_of_a_client_that_left_or_overruled_it_is_gone_within_two_steps(served: Served, how):
    streaming = served.stream([7], 400)  # so that the prompt is read in small pieces
    await served.steps(5)
    end, token = await served.session()
    await send(end, prompt(1, 0, [8] * LONG))
    await served.steps(4)
    assert max(served.lengths_since(-1)[0]) > 20
    begun = len(served.engine.steps)
    await _go(served, end, token, how)
    await served.steps(10)
    for step in served.engine.steps[begun + 2 :]:
        assert not any(list(request.prefix[:6]) == [8] * 6 for request in step)
    streaming.leave()
    await streaming.answering


@pytest.mark.parametrize("overruling", [CANCEL, BYE, prompt(2, 0, [9] * 5)], ids=["cancel", "bye", "prompt"])
@with_served()
async def test_a_prompt_that_is_overruled_at_once_costs_no_step(served: Served, overruling):
    end, _ = await served.session()
    await send(end, prompt(1, 0, [8] * LONG), overruling)
    await asyncio.sleep(5)
    worked_on = [request for step in served.engine.steps for request in step]
    assert not any(request.prefix[0] == 8 for request in worked_on)
    assert sum(request.sampling is not None for request in worked_on) == overruling.HasField("prompt")


# -- floods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames", [[prompt(1, 0, [8] * 100)] * 10, [prompt(1, 0, [8] * LONG)] * 5], ids=["many", "large"]
)
@with_served(NARROW)
async def test_a_flood_of_frames_ends_the_connection_and_its_work(served: Served, frames):
    end, _ = await served.session()
    await send(end, *frames)
    answers = [wire.ServerMessage.FromString(answer) async for answer in end]
    assert answers[-1].fault.code == wire.FAULT_CODE_PROTOCOL and "wait" in answers[-1].fault.text
    await served.link.closed()
    assert not len(served.verifier.worker) and len(served.engine.steps) <= 2


@with_served()
async def test_memory_rows_are_sent_once_however_often_they_are_requested(served: Served):
    end, _ = await served.session()
    await send(end, prompt(1, 0, [8] * 200))
    verdict = (await receive(end)).verdict
    assert verdict.rows_until == 200
    assert await rows_of(end, 200) == [(0, 64), (64, 64), (128, 64), (192, 8)]
    for length in range(200, 220):
        await send(end, draft(1, verdict.base_len + len(verdict.tokens), []))
        verdict = (await receive(end)).verdict
        assert await rows_of(end, 1) == [(length, 1)]
    before = len(served.engine.steps)
    for _ in range(20):  # a copy of the last frame, and of the first
        await send(end, draft(1, 219 + 1, []), prompt(1, 0, [8] * 200))
        assert (await receive(end)).verdict.base_len == 220 and (await receive(end)).verdict.base_len == 200
    assert await silent(end, 10) and len(served.engine.steps) == before
