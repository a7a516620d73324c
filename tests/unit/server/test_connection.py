"""One connection beside others: pings, sharing, overruled work and floods, on a toy target and a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from starlette.websockets import WebSocketDisconnect

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import Bearer
from moa_server.connection import CloseReason, Connection, FrameReader
from moa_server.edge.rate_limits import Budget, Budgets
from moa_server.settings import Settings
from support.memory_link import ClientEnd, ServerEnd
from support.server.in_memory import (
    SETTINGS,
    Served,
    asked,
    credit,
    draft,
    hello,
    own,
    prompt,
    receive,
    rows_of,
    send,
    silent,
    verdict_of,
    with_served,
)


def ping(stamp: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(ping=wire.Ping(stamp=stamp))


@with_served()
async def test_a_ping_is_answered_before_the_verdict_and_further_ones_wait(served: Served):
    served.engine.slow_s = 60.0
    end, _ = await served.session()
    began = asyncio.get_running_loop().time()
    await send(end, asked(stamp=4), *(ping(stamp) for stamp in (5, 6, 7)))
    assert (await receive(end)).pong.echo == wire.Echo(stamp=5)
    assert asyncio.get_running_loop().time() - began < 1
    verdict = (await receive(end)).verdict
    assert verdict.echo.stamp == 4 and verdict.echo.held_us > 60e6
    assert [(await receive(end)).WhichOneof("event") for _ in range(2)] == ["pong", "pong"]


@with_served(replace(SETTINGS, idle_seconds=10.0))
async def test_pings_alone_are_silence(served: Served):
    end, _ = await served.session()
    for _ in range(2):
        await asyncio.sleep(4)
        await send(end, ping())
        assert (await receive(end)).HasField("pong")
    await asyncio.sleep(4)
    assert (await receive(end)).fault.code == wire.FAULT_CODE_IDLE


@with_served()
async def test_a_pong_to_a_client_that_left_ends_the_session_without_a_failure(served: Served, caplog, monkeypatch):
    async def gone(end: ServerEnd, data: bytes) -> None:
        """Raise like Starlette: the first call learns that the client left, further ones are errors."""
        if end._closed:
            raise RuntimeError("send after close")
        end._closed = True
        raise WebSocketDisconnect(1006)

    caplog.set_level(logging.INFO, logger="moa_server")
    served.engine.slow_s = 1.0
    end, _ = await served.session()
    monkeypatch.setattr(ServerEnd, "send_bytes", gone)
    await send(end, asked(stamp=4), ping(stamp=5))
    await asyncio.sleep(10)
    await served.link.closed()
    assert not [record.levelname for record in caplog.records if record.levelno > logging.INFO]
    assert any(getattr(record, "data", {}).get("why") == CloseReason.LEFT.value for record in caplog.records)


# -- sharing the target ------------------------------------------------------------------------------


async def begun(served: Served, most: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session with a question and a limit of its answer's tokens."""
    end = await served.link.connect("")
    await send(end, hello(row_encoding=row_encoding), asked(most))
    await receive(end)
    return end


async def streaming(served: Served, round_trip_us: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session whose answer is pushed."""
    end = await begun(served, 800, row_encoding)
    await send(end, credit(800, round_trip_us=round_trip_us))
    return end


LONG = 900
NARROW = Settings(max_waiting_frames=8, max_frame_bytes=1024)

# -- work of a lost connection ----------------------------------------------------------------------

OVERRULING = {
    "cancel": wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0)),
    "bye": wire.ClientMessage(bye=wire.Bye()),
    "another prompt": prompt(2, 0, [9] * 5),
}


@pytest.mark.parametrize("how", ["cut", "replaced", *OVERRULING])
@with_served()
async def test_the_work_of_a_client_that_left_or_overruled_it_is_gone_within_two_steps(served: Served, how):
    streaming = served.stream([7], 400)  # so that the prompt is read in small pieces
    await served.steps(5)
    end, token = await served.session()
    await send(end, prompt(1, 0, [8] * LONG))
    await served.steps(4)
    assert max(served.lengths_since(-1)[0]) > 20
    begun = len(served.engine.steps)
    if how == "cut":
        served.link.cut()
    elif how == "replaced":
        await served.session(token)
    else:
        await send(end, OVERRULING[how])
    await served.steps(10)
    for step in served.engine.steps[begun + 2 :]:
        assert not any(list(request.prefix[:6]) == [8] * 6 for request in step)
    streaming.leave()
    await streaming.answering


@pytest.mark.parametrize("overruling", OVERRULING.values(), ids=OVERRULING.keys())
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


# -- unsolicited drafts ------------------------------------------------------------------------------


def unsolicited(base_len: int, tokens: list[int], stamp: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(
        draft=wire.Draft(epoch=1, base_len=base_len, tokens=tokens, unsolicited=True, stamp=stamp)
    )


@with_served()
async def test_an_unsolicited_draft_is_kept_during_a_step_and_answers_nothing(served: Served):
    served.engine.slow_s = 60.0
    end = await served.link.connect("")
    await send(end, hello(), asked(3))
    assert wire.CAPABILITY_UNSOLICITED_DRAFTS in (await receive(end)).welcome.capabilities
    first = await verdict_of(end)
    await send(end, credit(90))
    await asyncio.sleep(1)
    conversation, _ = served.connections[-1]._greeted or pytest.fail("no session")
    await send(end, unsolicited(4, [5, 6], 7))
    await asyncio.sleep(1)
    kept = conversation.session.newest_draft()
    assert kept is not None and (kept.tokens, kept.stamp) == ((5,), 7)  # the answer has room for no more
    second = await verdict_of(end)
    assert [*first.tokens, *second.tokens] == own(3)[3:5] and second.echo.stamp == 7


@pytest.mark.parametrize("budget", [Budget(), Budget(frames_per_second=10)], ids=["unlimited", "limited"])
@with_served(NARROW)
async def test_a_flood_of_unsolicited_drafts_delays_nothing(served: Served, monkeypatch, budget):
    spent_s = itertools.count(step=5e-6)  # of which a connection rests many times as long, on a slow machine too
    monkeypatch.setattr(time, "thread_time", lambda: next(spent_s))
    served.bearer = Bearer(budget=budget)
    end, _ = await served.session()
    await send(end, asked(20))
    await verdict_of(end)
    await send(end, *(unsolicited(4, [1 + at % 9], at + 1) for at in range(1000)))
    began = asyncio.get_running_loop().time()
    await send(end, credit(90))
    text = [token for _ in range(19) for token in (await verdict_of(end)).tokens]
    assert text == own(20)[4:] and asyncio.get_running_loop().time() - began < 1


def test_a_token_has_one_grammar_compiled_at_a_time():
    """The compiler has one thread: a token with many sessions fills its queue with one grammar, not with all."""
    said = wire.Grammar(kind=wire.GRAMMAR_KIND_REGEX, text="a")
    message = wire.ClientMessage(prompt=wire.Prompt(sampling=wire.Sampling(grammar=said)))

    async def compiling() -> list[str]:
        queue, going = [], asyncio.Event()

        class Slow:
            def knows(self, grammar: object) -> bool:
                return False

            async def compiled(self, grammar: object, answer: list[int]) -> None:
                queue.append(asyncio.current_task().get_name())
                await going.wait()

        verifier, tasks = SimpleNamespace(grammars=Slow()), []
        one, other = (Budgets(Budget(), lambda: 0.0) for _ in range(2))
        for name, budgets in [*[("one", one)] * 5, ("other", other)]:
            connection = SimpleNamespace(_verifier=verifier, _budgets=budgets)
            session = SimpleNamespace(answer_so_far=lambda _: [])
            tasks.append(asyncio.create_task(Connection._grammar_of(connection, message, session), name=name))
        await asyncio.sleep(0)
        waiting = list(queue)
        going.set()
        await asyncio.gather(*tasks)
        assert len(queue) == len(tasks)
        return waiting

    assert asyncio.run(compiling()) == ["one", "other"]


def test_a_frame_of_parts_that_replace_each_other_is_refused():
    """Two bytes begin a Prompt or a Draft of some 70 bytes of memory, of which the last one alone counts."""
    reader = SimpleNamespace(_most_bytes=1 << 20, _settings=SETTINGS)
    tags = [
        number << 3 | 2 for number in (wire.ClientMessage.PROMPT_FIELD_NUMBER, wire.ClientMessage.DRAFT_FIELD_NUMBER)
    ]
    bomb = bytes([tags[0], 0, tags[1], 0]) * 10_000
    assert FrameReader._parse(reader, bomb).fault.code == wire.FAULT_CODE_PROTOCOL
    said = prompt(1, 0, [0, 1, 2])
    assert FrameReader._parse(reader, said.SerializeToString()) == said


def test_a_connection_rests_after_each_draft_that_nobody_asked_for(monkeypatch):
    """Parsing large ones, which no limit of waiting frames ends, took all of the event loop."""
    frame = wire.ClientMessage(draft=wire.Draft(tokens=[40000] * 100_000)).SerializeToString()
    rests: list[float] = []

    class Flood:
        async def receive(self) -> dict[str, object]:
            return {"type": "websocket.receive", "bytes": frame}

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            reader.end(CloseReason.LEFT)

    async def flooded() -> FrameReader:
        nonlocal reader
        reader = FrameReader(Flood(), SETTINGS, lambda message: message.HasField("draft"), lambda: None)
        reader._most_bytes = SETTINGS.max_frame_bytes
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await reader._reading
        monkeypatch.undo()
        return reader

    reader: FrameReader
    assert list(asyncio.run(flooded()).waiting) == [] and len(rests) == 3
    assert min(rests) > 0.01, "fifty times the milliseconds of parsing"


def test_a_grammar_is_not_awaited_for_a_client_that_left():
    """Else clients that send one after the other and leave hold all places until the last is compiled."""

    async def left() -> tuple[str | None, str | None, bool]:
        reader = SimpleNamespace(_over=asyncio.Event())
        dropped = asyncio.Event()

        async def endless() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                dropped.set()

        async def known() -> str:
            return "known"

        waiting = asyncio.create_task(FrameReader.unless_over(reader, endless()))
        await asyncio.sleep(0)
        reader._over.set()
        found = await waiting
        await dropped.wait()
        return found, await FrameReader.unless_over(reader, known()), dropped.is_set()

    assert asyncio.run(left()) == (None, "known", True)
