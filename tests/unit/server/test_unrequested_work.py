"""Answers that continue without a request, in a credit or in the background, on a toy target and a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import ServerSession
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.drafting.own_draft import OwnDraft
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.edge.rate_limits import Budget
from moa_server.settings import Settings
from support.memory_link import ClientEnd
from support.server.in_memory import (
    PROMPT,
    SETTINGS,
    Served,
    asked,
    credit,
    draft,
    in_served,
    own,
    prompt,
    receive,
    resumed,
    send,
    silent,
    verdict_of,
    with_served,
)
from support.toy_engine import STOP, ToyEngine, plain

LONG = [8] * 200


class Followed:
    """What a client knows of its answer. Neither text nor memory rows may have gaps."""

    def __init__(self, end: ClientEnd, tokens: Sequence[int]) -> None:
        self.end, self.tokens, self.rows = end, list(tokens), 0

    async def take(self) -> wire.ServerMessage:
        message = await receive(self.end)
        if message.HasField("verdict"):
            assert message.verdict.base_len == len(self.tokens)
            self.tokens += message.verdict.tokens
        elif message.HasField("rows"):
            assert message.rows.start == self.rows
            self.rows += message.rows.count
        return message

    async def until(self, kind: str) -> Any:
        while (message := await self.take()).WhichOneof("event") != kind:
            assert message.WhichOneof("event") in ("verdict", "rows"), message
        return getattr(message, kind)

    async def finish(self) -> None:
        """Take verdicts until the answer ends."""
        while not (await self.until("verdict")).finish:
            pass

    async def pushed_until(self, length: int) -> None:
        """Take pushed verdicts until the answer has this number of tokens."""
        while len(self.tokens) < length:
            assert (await self.until("verdict")).pushed

    async def rows_until(self, length: int) -> None:
        """Take frames until this number of memory rows has come; all are rows."""
        while self.rows < length:
            assert (await self.take()).HasField("rows")


async def begun(served: Served, position: int, tokens: list[int] = PROMPT, *, most: int = 0) -> Followed:
    """A client whose question has its first token, and a credit up to ``position``."""
    end, _ = await served.session()
    await send(end, asked(most, tokens), credit(position))
    followed = Followed(end, tokens)
    assert not (await followed.until("verdict")).pushed
    return followed


def session_of(served: Served) -> ServerSession:
    [conversation] = served.verifier.store._conversations.values()
    return conversation.session


@with_served(replace(SETTINGS, idle_seconds=1000), budget=Budget(frames_per_second=1))
async def test_the_verifier_continues_up_to_the_position_of_the_credit(served: Served):
    followed, clock = await begun(served, 20), asyncio.get_running_loop().time
    began = clock()
    await followed.pushed_until(20)
    assert clock() - began < 10, "pushed verdicts use no budget of frames"
    assert followed.tokens == own(17)
    await followed.rows_until(19)
    steps = len(served.engine.steps)
    assert await silent(followed.end, 100) and len(served.engine.steps) == steps
    await send(followed.end, credit(25, 2))
    await followed.pushed_until(25)
    await send(followed.end, draft(1, 25, [own(23)[25]]))
    verdict = await followed.until("verdict")
    assert (verdict.pushed, verdict.accepted) == (False, 1) and followed.tokens == own(24)


async def hung(served: Served, most: int) -> Followed:
    """A client that is silent at its tenth token, as on a link that hangs; its answer continues meanwhile."""
    end, _ = await served.session()
    await send(end, asked(most, while_away=True), credit(10))
    followed = Followed(end, PROMPT)
    while len(followed.tokens) < 10:
        await followed.until("verdict")
    await asyncio.sleep(2.5)
    assert 10 < len(session_of(served).committed) < 63
    return followed


@pytest.mark.parametrize("most", [20, 60])
@with_served()
async def test_a_client_that_hung_gets_the_text_written_meanwhile_with_its_next_credit(served: Served, most):
    followed = await hung(served, most)
    await send(followed.end, credit(200, 2))
    await followed.finish()
    assert followed.tokens == own(most)
    await followed.rows_until(most + 2)


@with_served()
async def test_a_client_that_hung_and_revokes_its_credit_continues_at_its_own_position(served: Served):
    followed = await hung(served, 60)
    await send(followed.end, credit(0, 2), draft(1, 10, own(60)[10:14]))
    assert (await followed.until("standing")).serial == 2
    verdict = await followed.until("verdict")
    assert verdict.accepted == 4 and followed.tokens == session_of(served).committed
    await send(followed.end, credit(200, 3))
    await followed.finish()
    assert followed.tokens == own(60)


@with_served()
async def test_a_connection_that_was_replaced_takes_no_rows_from_the_next(served: Served):
    """Its last verdict was still on its way into a full socket."""
    old = await begun(served, 400, LONG)
    socket = served.connections[0]._websocket
    send_bytes, room = socket.send_bytes, asyncio.Event()

    async def full(data: bytes) -> None:
        await room.wait()
        await send_bytes(data)

    while old.rows < 16:
        await old.take()
    socket.send_bytes = full  # type: ignore[method-assign]
    await asyncio.sleep(1)
    end, [token] = await served.link.connect(""), served.verifier.store._conversations
    await send(end, resumed(token, old.tokens, credit=400))
    assert (await receive(end)).welcome.committed_length == len(old.tokens)
    new = Followed(end, old.tokens)
    while not session_of(served)._rows._waiting:
        await new.take()
    room.set()
    await new.pushed_until(300)
    await new.rows_until(200)
    assert new.tokens == own(300, LONG)[: len(new.tokens)]


# -- with drafts of the verifier's own ---------------------------------------------------------------


class Knowing(ServerDrafting):
    """Drafts seven tokens of the toy's own, the last of them wrong."""

    def __init__(self) -> None:
        super().__init__(None, Limits(), [STOP])

    def offered(self, sequence: int, prefix: Sequence[int], sampling: Sampling, room: int | None = None) -> OwnDraft:
        right = plain(ToyEngine(), prefix, 7)
        drafted = [*right[:-1], 1 + right[-1] % 40][: None if room is None else room - 1]
        return OwnDraft(tuple(drafted), tuple(range(len(drafted))), (0.9,) * len(drafted))


@with_served(drafts=Knowing)
async def test_a_pushed_verdict_tells_what_was_drafted_for_it(served: Served):
    followed = await begun(served, 500, most=71)
    verdicts = []
    while len(followed.tokens) < 74:
        verdicts.append(await followed.until("verdict"))
    assert followed.tokens == own(71)
    assert all(each.pushed for each in verdicts)
    figures = [(each.drafted, each.accepted, len(each.tokens)) for each in verdicts]
    assert figures == [(7, 6, 7)] * 9 + [(6, 6, 7)]  # for the last there is no more room
    await followed.rows_until(73)
    assert await silent(followed.end, 5) and not len(served.verifier.worker)


@with_served()
async def test_a_prompt_is_no_round_of_the_acceptance(served: Served):
    await served.answering(asked(60))
    assert not served.verifier.metrics.acceptance.message()["rounds"]


def test_a_budget_of_drafted_tokens_holds_back_drafts_and_no_text():
    """Only the verifier chose to draft."""

    def seconds(budget: Budget) -> float:
        async def scenario(served: Served) -> float:
            clock = asyncio.get_running_loop().time
            followed = await begun(served, 500)
            began, drafted = clock(), 0
            while len(followed.tokens) < 200:
                drafted += (await followed.until("verdict")).drafted
            took = clock() - began
            assert followed.tokens == own(len(followed.tokens) - 3)
            assert 0 < drafted <= (2 + took) * (budget.drafted_tokens_per_second or 1000) + 7
            return took

        return in_served(scenario, budget=budget, drafts=Knowing)

    assert seconds(Budget()) < seconds(Budget(drafted_tokens_per_second=1)) < 200 * 0.04


# -- what goes wrong ---------------------------------------------------------------------------------


class Broken(set[int]):
    """The steps on which the engine fails, for :attr:`ToyEngine.broken`: all, or only those for memory rows alone."""

    def __init__(self, served: Served, *, rows_only: bool) -> None:
        super().__init__()
        self._steps, self._rows_only = served.engine.steps, rows_only

    def __rand__(self, names: set[int]) -> set[int]:
        return {each.sequence for each in self._steps[-1] if each.sampling is None or not self._rows_only}


@pytest.mark.parametrize("rows_only", [False, True])
@with_served()
async def test_a_failing_engine_is_one_fault_and_the_credit_is_granted_again(served: Served, caplog, rows_only):
    followed = await begun(served, 230, LONG)
    served.engine.broken = Broken(served, rows_only=rows_only)
    fault = await followed.until("fault")
    assert fault.code == wire.FAULT_CODE_INTERNAL and fault.retry_after_ms > 0
    steps = len(served.engine.steps)
    assert await silent(followed.end, 10) and len(served.engine.steps) == steps
    assert len(caplog.records) == 1
    served.engine.broken = set()
    await send(followed.end, credit(230))  # once more, as a client does that was told to try again
    await followed.pushed_until(230)
    assert followed.tokens == own(30, LONG)
    await followed.rows_until(229)


@with_served()
async def test_rows_on_which_the_engine_fails_are_no_fault_and_come_with_the_next_frame(served: Served, caplog):
    """There is no frame to be sent again; and a verifier that tried on and on would fail for ever."""
    end, _ = await served.session()
    served.engine.broken = Broken(served, rows_only=True)
    await send(end, asked(tokens=LONG))
    followed = Followed(end, LONG)
    await followed.until("verdict")
    assert await silent(end, 10) and not len(served.verifier.worker)
    assert len(caplog.records) == 1
    served.engine.broken = set()
    await send(end, draft(1, 201, []))
    await followed.until("verdict")
    await followed.rows_until(201)
    assert followed.tokens == own(2, LONG)


# -- budgets -----------------------------------------------------------------------------------------


def test_a_budget_of_row_bytes_holds_back_rows_and_no_text():
    def answered(budget: Budget) -> tuple[float, int]:
        """Seconds until the text is complete, and rows that came meanwhile."""

        async def scenario(served: Served) -> tuple[float, int]:
            clock = asyncio.get_running_loop().time
            end, _ = await served.session()
            await send(end, asked(tokens=LONG), credit(300))
            followed, began = Followed(end, LONG), clock()
            while len(followed.tokens) < 300:
                await followed.until("verdict")
            figures = clock() - began, followed.rows
            assert followed.tokens == own(100, LONG)
            await followed.rows_until(299)
            return figures

        return in_served(scenario, budget=budget)

    free_s, free_rows = answered(Budget())
    bound_s, bound_rows = answered(Budget(row_bytes_per_second=4))  # a row of the toy has six, four of them are scales
    assert bound_rows < 40 < 200 < free_rows
    some_s, some_rows = answered(Budget(row_bytes_per_second=60))
    assert 0 < 6 * some_rows <= 60 * (2 + some_s) + 6 * 16  # and one frame
    assert bound_s < free_s  # no rows are made meanwhile either


@with_served()
async def test_rows_that_are_asked_for_again_on_each_connection_come_slowly_after_a_while(served: Served):
    clock, context = asyncio.get_running_loop().time, served.engine.max_context
    token, waited = "", []
    for epoch in range(1, 1 + 4 * context // len(LONG)):
        end, token = await served.session(token)
        await send(end, prompt(epoch, 0, LONG) if epoch == 1 else prompt(epoch, 199, [8]))
        followed, began = Followed(end, LONG), clock()
        await followed.until("verdict")
        await send(end, draft(epoch, len(followed.tokens), []))
        await followed.until("verdict")
        assert clock() - began < 10, "text does not wait"
        while followed.rows < len(LONG):
            await followed.take()
        waited.append(clock() - began)
    assert max(waited[: context // len(LONG)]) < 1 and 60 < sum(waited) < 180


# -- background answers ------------------------------------------------------------------------------


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
    token, tokens = await served.left(40)
    await until_none(served)
    steps = len(served.engine.steps)
    end, welcome = await back(served, token, tokens)
    verdict = await verdict_of(end)
    assert welcome.verdict_follows and welcome.committed_length == len(tokens)
    assert welcome.limits.away_seconds == SETTINGS.away_seconds
    assert [*tokens, *verdict.tokens] == own(40) and verdict.finish and verdict.base_len == len(tokens)
    assert len(served.engine.steps) == steps


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
        token, tokens = await served.left(200, **options)
        await asyncio.sleep(10)
        assert not len(served.verifier.background_answers)
        end, welcome = await back(served, token, tokens)
        assert welcome.limits.away_seconds == int(settings.away_seconds)
        written = len((await verdict_of(end)).tokens) if welcome.verdict_follows else 0
        assert written < most <= written + 15

    in_served(scenario, settings)


@with_served()
async def test_a_failing_engine_ends_a_background_answer(served: Served):
    token, tokens = await served.left(40)
    served.engine.broken.update(each.sequence for each in served.verifier.store._conversations.values())
    await until_none(served)
    served.engine.broken.clear()
    _, welcome = await back(served, token, tokens)
    assert welcome.committed_length == len(tokens)


@with_served(Settings(keep_seconds=0.05))
async def test_a_forgotten_conversation_is_not_continued(served: Served):
    await served.left(200)
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

    async def prepare(self, *about: object) -> bool:
        await asyncio.sleep(0.01)
        return False


@with_served(drafts=Slow)
async def test_a_background_answer_takes_no_step_while_the_server_drafts(served: Served):
    for _ in range(5):
        await served.left(900)
    end, _, tokens = await served.answering(asked(60, while_away=True), credit(100))
    before = len(served.engine.steps)
    while len(tokens) < 50:
        tokens += (await verdict_of(end)).tokens
    assert {len(step) for step in served.lengths_since(before)} == {1} and len(served.engine.steps) - before < 50
    assert tokens == own(47) and len(served.verifier.background_answers) == 5
    assert served.verifier.worker.serving == 1, "background answers share the target with no client"
    await served.steps(20)


@with_served()
async def test_a_drafting_client_waits_for_a_short_step_at_most(served: Served):
    for _ in range(30):
        await served.left(900)
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
