"""A verifier that goes on by itself within a credit, on a toy target and a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from memory_link import ClientEnd
from moa_runtime.session.events import Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.bearers import Bearer
from moa_server.budgets import Budget
from moa_server.settings import Settings
from server.in_memory import CLIENT, Served, in_served, next_verdict, receive, send
from server.running import Client, serving
from soak.raw import draft, prompt
from toy_engine import ToyEngine, plain

PROMPT = [7, 8, 9]
QUIET_S = 5.0  # far longer than any step of the toy's


def credit(position: int, serial: int = 1, stamp: int = 0) -> wire.ClientMessage:
    return wire.ClientMessage(credit=wire.Credit(epoch=1, position=position, serial=serial, stamp=stamp))


def own(most: int) -> list[int]:
    return [*PROMPT, *plain(ToyEngine(), PROMPT, most)]


async def asked(served: Served, most: int = 200) -> tuple[ClientEnd, list[int]]:
    """A session with its first token."""
    end, _ = await served.session()
    await send(end, prompt(1, 0, PROMPT, most=most))
    return end, [*PROMPT, *(await next_verdict(end)).tokens]


async def waiting(end: ClientEnd) -> list[wire.ServerMessage]:
    """What has come, and comes while nothing is sent."""
    await asyncio.sleep(QUIET_S)
    return [wire.ServerMessage.FromString(frame) for frame in end.down.take_all()]


def tokens_of(frames: list[wire.ServerMessage]) -> list[int]:
    return [token for frame in frames for token in frame.verdict.tokens]


def rows_of(frames: list[wire.ServerMessage]) -> list[int]:
    rows = [frame.rows for frame in frames if frame.HasField("rows")]
    return [position for each in rows for position in range(each.start, each.start + each.count)]


def test_it_goes_on_to_the_position_and_no_further():
    async def scenario(served: Served) -> None:
        end, tokens = await asked(served)
        await send(end, credit(50))
        frames = await waiting(end)
        assert [*tokens, *tokens_of(frames)] == own(47)
        assert all(frame.verdict.pushed for frame in frames if frame.HasField("verdict"))
        assert rows_of(frames) == list(range(49))
        await send(end, credit(60, 2))
        assert [*own(47), *tokens_of(await waiting(end))] == own(57)

    in_served(scenario)


def test_the_end_of_the_answer_ends_it():
    async def scenario(served: Served) -> None:
        end, tokens = await asked(served, most=20)
        await send(end, credit(1000))
        frames = await waiting(end)
        assert [*tokens, *tokens_of(frames)] == own(20)
        verdicts = [frame.verdict for frame in frames if frame.HasField("verdict")]
        assert [bool(verdict.finish) for verdict in verdicts] == [False] * 18 + [True]

    in_served(scenario)


def test_a_client_that_takes_over_is_told_where_it_stands_and_drafts():
    async def scenario(served: Served) -> None:
        end, tokens = await asked(served)
        await send(end, credit(1000, stamp=77))
        for _ in range(10):
            tokens += (await next_verdict(end)).tokens
        await send(end, credit(0, 2, stamp=78))
        frames = await waiting(end)
        kinds = [frame.WhichOneof("event") for frame in frames]
        standing = frames[kinds.index("standing")].standing
        assert (standing.epoch, standing.serial, standing.echo.stamp) == (1, 2, 78)
        assert "verdict" not in kinds[kinds.index("standing") :]
        tokens += tokens_of(frames)
        assert tokens == own(len(tokens) - len(PROMPT))
        following = own(200)[len(tokens) :]
        await send(end, draft(1, len(tokens), following[:3]))
        verdict = await next_verdict(end)
        assert (verdict.accepted, list(verdict.tokens), verdict.pushed) == (3, following[:4], False)

    in_served(scenario)


def test_two_who_stream_have_a_token_of_each_step():
    async def scenario(served: Served) -> None:
        ends = [(await asked(served))[0] for _ in range(2)]
        for end in ends:
            await send(end, credit(100))
        await served.steps(10)
        begun = len(served.engine.steps)
        await served.steps(20)
        both = [step for step in served.engine.steps[begun:] if len(step) == 2]
        assert len(both) >= 15

    in_served(scenario)


def test_an_engine_that_fails_is_one_fault_and_the_session_goes_on():
    async def scenario(served: Served) -> None:
        end, tokens = await asked(served)
        await send(end, credit(1000))
        tokens += (await next_verdict(end)).tokens
        sequence = served.engine.steps[-1][0].sequence
        served.engine.broken.add(sequence)
        frames = await waiting(end)
        faults = [frame.fault for frame in frames if frame.HasField("fault")]
        assert [fault.code for fault in faults] == [wire.FAULT_CODE_INTERNAL] and faults[0].retry_after_ms
        tokens += tokens_of(frames)
        served.engine.broken.clear()
        assert not tokens_of(await waiting(end))
        await send(end, credit(60, 2))
        assert [*tokens, *tokens_of(await waiting(end))] == own(57)

    in_served(scenario)


@pytest.mark.parametrize("how", ["cut", "replaced", "another prompt", "cancel"])
def test_nobody_goes_on_for_who_left_or_changed_his_mind(how):
    async def scenario(served: Served) -> None:
        end, token = await served.session()
        await send(end, prompt(1, 0, PROMPT))
        await send(end, credit(1000))
        await served.steps(5)
        if how == "cut":
            served.link.cut()
        elif how == "replaced":
            await served.session(token)
        elif how == "cancel":
            await send(end, wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0)))
        else:
            await send(end, prompt(2, 0, [9] * 5))
        begun = len(served.engine.steps)
        await asyncio.sleep(QUIET_S)
        later = [request for step in served.engine.steps[begun + 2 :] for request in step]
        assert not any(request.prefix[:3] == PROMPT and request.sampling for request in later)

    in_served(scenario)


def test_a_budget_of_bytes_holds_back_memory_rows_and_no_text():
    """The toy's rows have 4 bytes each: two seconds' worth at once, then 8 a second, and debt for one frame."""

    async def scenario(served: Served) -> None:
        end, tokens = await asked(served)
        await send(end, credit(103))
        frames = await waiting(end)
        assert [*tokens, *tokens_of(frames)] == own(100)
        held_back = rows_of(frames)
        assert len(held_back) < 90
        await asyncio.sleep(120)
        assert held_back + rows_of(await waiting(end)) == list(range(102))

    in_served(scenario, bearer=Bearer(budget=Budget(row_bytes_per_second=8.0)))


def test_a_verifier_that_ends_drains_who_streams():
    """The connection is closed with what was decided sent, and the answer goes on at another verifier."""
    engine = ToyEngine(delay_s=(0.005, 0.0))
    right = [*PROMPT, *plain(engine, PROMPT, 100)]
    with serving(engine, Settings()) as second:
        with serving(ToyEngine(delay_s=(0.005, 0.0)), Settings()) as first:
            client = Client(first, engine)
            client.connect()
            client.session.prompt(PROMPT, Sampling(), 100)
            while not client.session.may_lend:
                client.exchange()
            client.session.lend(1000)
            while len(client.session.committed) < 30:
                client.exchange()
        client.until_lost()
        reached = len(client.session.committed)
        assert 30 <= reached < len(right) and client.session.committed == right[:reached]
        client.connect(second)
        client.rounds(lambda tokens: [])
        client.socket.close()
        assert client.session.committed == right


# -- a verifier that asks its clients to draft -------------------------------------------------------


async def streaming(served: Served, round_trip_us: int, row_encoding: int = wire.ROW_ENCODING_INT8) -> ClientEnd:
    """A session whose answer is pushed."""
    end = await served.link.connect("")
    await send(end, CLIENT.hello(row_encoding=row_encoding))
    await receive(end)
    await send(end, prompt(1, 0, PROMPT, most=800))
    lent = credit(800)
    lent.credit.round_trip_us = round_trip_us
    await send(end, lent)
    return end


async def asked_to_draft(end: ClientEnd) -> bool:
    """By the newest of what has come."""
    await asyncio.sleep(1)
    verdicts = [wire.ServerMessage.FromString(frame).verdict for frame in end.down.take_all()]
    return [verdict for verdict in verdicts if verdict.tokens][-1].drafts_wanted


def test_clients_are_asked_to_draft_where_many_stream_those_with_short_round_trips_first():
    async def scenario(served: Served) -> None:
        ends = [await streaming(served, trip) for trip in (30_000, 5_000)]
        assert [await asked_to_draft(end) for end in ends] == [False, False]
        ends += [await streaming(served, trip) for trip in (90_000, 1_000, 60_000)]
        assert [await asked_to_draft(end) for end in ends] == [True, True, False, True, False]
        await send(ends[3], wire.ClientMessage(cancel=wire.Cancel(epoch=2, base_len=0)))
        assert [await asked_to_draft(end) for end in ends[:3]] == [True, True, False]

    in_served(scenario, Settings(max_waiting_frames=8, ask_from=2))


def test_who_cannot_draft_or_does_not_say_how_far_it_is_is_not_asked():
    async def scenario(served: Served) -> None:
        ends = [await streaming(served, 1_000, wire.ROW_ENCODING_UNSPECIFIED), await streaming(served, 0)]
        ends.append(await streaming(served, 50_000))
        assert [await asked_to_draft(end) for end in ends] == [False, False, True]

    in_served(scenario, Settings(max_waiting_frames=8, ask_from=1))
