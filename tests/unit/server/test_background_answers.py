"""Answers that go on while their client is away, on a toy target and a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from moa_runtime.session.handshake import Limits
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.drafting.server_drafting import NOTHING, Proposal, ServerDrafting
from moa_server.settings import Settings
from support.memory_link import ClientEnd
from support.server.in_memory import (
    SETTINGS,
    Served,
    asked,
    credit,
    in_served,
    own,
    receive,
    resumed,
    send,
    verdict_of,
    with_served,
)
from support.server.raw import draft
from support.toy_engine import STOP


async def left(served: Served, most: int, while_away: bool = True) -> tuple[str, list[int]]:
    """A client asks, has its first token, and is gone: its resume token, and its tokens."""
    _, token, tokens = await served.answering(asked(most, while_away=while_away))
    await served.cut()
    return token, tokens


async def back(served: Served, token: str, tokens: list[int]) -> tuple[ClientEnd, wire.Welcome]:
    """The client reconnects with these tokens."""
    end = await served.link.connect("")
    await send(end, resumed(token, tokens))
    return end, (await receive(end)).welcome


async def until_none(served: Served) -> None:
    """Wait until no answer is continued any more."""
    while len(served.verifier.background_answers):
        await asyncio.sleep(0.1)


@with_served()
async def test_the_whole_answer_comes_after_the_welcome(served: Served):
    token, tokens = await left(served, 40)
    await until_none(served)
    steps = len(served.engine.steps)
    end, welcome = await back(served, token, tokens)
    verdict = await verdict_of(end)
    assert welcome.verdict_follows and welcome.committed_length == len(tokens)
    assert welcome.limits.away_seconds == SETTINGS.away_seconds
    assert [*tokens, *verdict.tokens] == own(40) and verdict.finish and verdict.base_len == len(tokens)
    assert len(served.engine.steps) == steps


@with_served()
async def test_the_answer_of_a_silent_client_continues_too(served: Served):
    """Its link may hang. A draft at its position is then answered without a step."""
    end, _, tokens = await served.answering(asked(40, while_away=True))
    await asyncio.sleep(1)
    assert not len(served.verifier.background_answers)
    await asyncio.sleep(60)
    steps = len(served.engine.steps)
    await send(end, wire.ClientMessage(draft=wire.Draft(epoch=1, base_len=len(tokens))))
    verdict = await verdict_of(end)
    assert [*tokens, *verdict.tokens] == own(40) and verdict.finish and len(served.engine.steps) == steps


@pytest.mark.parametrize(
    ("settings", "options", "most"),
    [
        (SETTINGS, {"while_away": False}, 1),
        (Settings(away_seconds=0), {}, 1),
        (Settings(away_tokens=5), {}, 6),
        (Settings(away_seconds=0.5), {}, 25),
    ],
    ids=["the client does not want it", "the server does not", "tokens", "seconds"],
)
def test_a_background_answer_ends_at_the_limits_of_client_and_server(settings, options, most):
    async def scenario(served: Served) -> None:
        token, tokens = await left(served, 200, **options)
        await asyncio.sleep(10)
        assert not len(served.verifier.background_answers)
        end, welcome = await back(served, token, tokens)
        assert welcome.limits.away_seconds == int(settings.away_seconds)
        written = len((await verdict_of(end)).tokens) if welcome.verdict_follows else 0
        assert written < most <= written + 15

    in_served(scenario, settings)


@with_served()
async def test_a_background_answer_takes_no_step_from_connected_clients(served: Served):
    await left(served, 100)
    stream = served.stream([5, 6], 60)
    await served.steps(5)
    before = len(served.engine.steps)
    await served.steps(30)
    assert {len(step) for step in served.lengths_since(before)} == {1}
    assert len(stream.tokens) > 30 and len(served.verifier.background_answers) == 1
    stream.leave()
    await stream.answering
    await served.steps(5)


@with_served()
async def test_a_failing_engine_ends_a_background_answer(served: Served):
    token, tokens = await left(served, 40)
    served.engine.broken.update(each.sequence for each in served.verifier.store._conversations.values())
    await until_none(served)
    served.engine.broken.clear()
    _, welcome = await back(served, token, tokens)
    assert welcome.committed_length == len(tokens)


@with_served(Settings(keep_seconds=0.05))
async def test_a_forgotten_conversation_is_not_continued(served: Served):
    await left(served, 200)
    assert len(served.verifier.background_answers) == 1
    await asyncio.sleep(0.1)
    served.verifier.store.sweep()
    await asyncio.sleep(0.1)
    assert not len(served.verifier.store) and not len(served.verifier.background_answers)
    assert not served.engine.sequences_open


class Slow(ServerDrafting):
    """A draft takes 10 ms, and is nothing."""

    def __init__(self) -> None:
        super().__init__(None, Limits(), [STOP])

    async def propose(self, *about: object, **options: object) -> Proposal:
        await asyncio.sleep(0.01)
        return NOTHING


@with_served(drafts=Slow)
async def test_a_background_answer_takes_no_step_while_the_server_drafts(served: Served):
    for _ in range(5):
        await left(served, 900)
    end, _, tokens = await served.answering(asked(60, while_away=True), credit(100))
    before = len(served.engine.steps)
    while len(tokens) < 50:
        tokens += (await verdict_of(end)).tokens
    assert {len(step) for step in served.lengths_since(before)} == {1} and len(served.engine.steps) - before < 50
    assert tokens == own(47) and len(served.verifier.background_answers) == 5
    await served.steps(20)


@with_served()
async def test_a_drafting_client_waits_for_a_short_step_at_most(served: Served):
    for _ in range(30):
        await left(served, 900)
    end, _, tokens = await served.answering(asked(60, while_away=True))
    before = len(served.engine.steps)
    while len(tokens) < 20:
        await asyncio.sleep(0.1)
        await send(end, draft(1, len(tokens), []))
        tokens += (await verdict_of(end)).tokens
    sizes = [len(step) for step in served.lengths_since(before)]
    assert len(sizes) > 40 and max(sizes) <= 6
    await asyncio.sleep(3)
    assert len(served.lengths_since(before)[-1]) > 30  # the client is silent now
