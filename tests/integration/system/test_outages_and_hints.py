"""What makes text "offline" and brings the question, and what the host's hints change. On a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest

from moa_runtime.drafters.base import Budget
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    Disagreement,
    LinkChanged,
    LinkStatus,
    Paused,
    PauseReason,
)
from moa_runtime.options import Conditions
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from support.memory_link import ClientEnd
from support.system.asking import DEVICE_DRAFTS, UNOPENED, committed, ids, written_offline
from support.system.fuzz_world import RIGHT, WRONG, Limits, World
from support.toy_engine import plain

COUNT = 80
NOTICED_AFTER = pytest.mark.parametrize("noticed_after", [0.0, 8.0], ids=["at once", "by the ping"])
WITH_RIGHT = pytest.mark.parametrize("limits", [RIGHT], ids=["right"])
WITH_METERED = pytest.mark.parametrize("limits", [replace(RIGHT, skill=0.8, trees=True, ahead=3)], ids=["trees"])


@pytest.fixture
def limits() -> Limits:
    return WRONG


@dataclass
class Seen:
    """What an application saw of an answer, and what it asked of its drafter."""

    events: list[ChatEvent] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def statuses(self) -> list[LinkStatus]:
        """Of the link, a late verdict's included."""
        return [change.status for change in self.of(LinkChanged)]

    @property
    def late(self) -> bool:
        return any(change.late for change in self.of(LinkChanged))

    @property
    def pauses(self) -> list[PauseReason]:
        return [pause.reason for pause in self.of(Paused)]

    @property
    def most_unconfirmed(self) -> int:
        return max(len(update.tokens) - committed(update) for update in self.of(AnswerUpdate))

    @property
    def most_offline(self) -> int:
        return max(map(written_offline, self.of(AnswerUpdate)))

    @property
    def answer(self) -> AnswerFinished:
        assert isinstance(self.events[-1], AnswerFinished)
        return self.events[-1]


@contextlib.asynccontextmanager
async def answering(world: World, after: int = 4) -> AsyncIterator[Seen]:
    """While an answer comes: from ``after`` confirmed tokens to its end, when it must be the target's own."""
    seen, ready, propose = Seen(), asyncio.Event(), world.drafter.propose

    def watched(prefix: Sequence[int], budget: Budget, sampling: Sampling) -> DraftTree:
        seen.budgets.append(budget)
        return propose(prefix, budget, sampling)

    async def listen() -> None:
        async with contextlib.aclosing(world.chat.send("Why?", max_new_tokens=COUNT)) as events:
            async for event in events:
                seen.events.append(event)
                if committed(event) >= after:
                    ready.set()

    world.drafter.propose = watched  # type: ignore[method-assign]
    listening = asyncio.create_task(listen())
    try:
        await ready.wait()
        yield seen
        await listening
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    own = plain(world.engine, world.chat.tokens[: world.chat.prompt_tokens], COUNT)
    assert ids(seen.answer) == own


def lose(world: World, noticed_after: float = 0.0) -> None:
    """The connection dies, and there is none until ``world.link.open`` is set."""
    world.link.open = False
    world.link.cut(noticed_after, 40.0)


def moved(world: World) -> int:
    """Payload bytes that the device sent so far."""
    return world.chat._driver.bytes_moved()[0]


def checked(seen: Seen, *, offline: bool) -> None:
    """Much text was replaced in place; the user was asked about offline text alone."""
    assert seen.most_unconfirmed >= 12 and any(update.dropped for update in seen.of(AnswerUpdate))
    assert (seen.most_offline >= 8) is offline and (seen.answer.statistics.offline > 0) is False
    assert len(seen.of(Disagreement)) == offline


# -- drafted or offline -------------------------------------------------------------------------------


async def test_text_after_a_late_verdict_is_drafted(world: World) -> None:
    """However late it is."""
    async with answering(world) as seen:
        swift, world.link.delay_down = world.link.delay_down, lambda: 50.0
        await asyncio.sleep(1)
        world.link.delay_down = swift
    assert seen.late and seen.statuses == [LinkStatus.ONLINE] * 2
    checked(seen, offline=False)


@NOTICED_AFTER
async def test_a_blip_makes_no_offline_text(world: World, noticed_after: float) -> None:
    """The connection dies, and the next one stands within a second."""
    async with answering(world) as seen:
        world.link.cut(noticed_after, 40.0)
    assert LinkStatus.OFFLINE in seen.statuses and seen.late is bool(noticed_after)
    checked(seen, offline=False)


async def test_an_outage_after_a_blip_leaves_drafted_text_drafted(world: World) -> None:
    """All that may be written alone was written before it."""
    async with answering(world) as seen:
        swift, world.link.delay_down = world.link.delay_down, lambda: 30.0
        await asyncio.sleep(5)
        assert seen.late
        world.link.cut(0.0, 40.0)
        while world.chat.status is LinkStatus.ONLINE:
            await asyncio.sleep(0.01)
        world.link.delay_down = swift
        while world.chat.status is not LinkStatus.ONLINE:
            await asyncio.sleep(0.001)
        lose(world)
        await asyncio.sleep(5)
        world.link.open = True
    checked(seen, offline=False)


@NOTICED_AFTER
async def test_an_outage_makes_offline_text_and_brings_the_question(world: World, noticed_after: float) -> None:
    """Also of what was written while the link was dead and not known to be."""
    async with answering(world) as seen:
        lose(world, noticed_after)
        await asyncio.sleep(noticed_after + 0.5)
        assert seen.most_unconfirmed >= 12 and seen.most_offline == 0, "so far it may be a blip"
        await asyncio.sleep(5)
        assert seen.most_offline >= 8
        world.link.open = True
    checked(seen, offline=True)


async def test_offline_by_choice_is_an_outage_at_once(world: World) -> None:
    async with answering(world) as seen:
        await world.chat.work_offline(True)
        await asyncio.sleep(0.1)
        assert seen.most_offline >= 8
        await world.chat.work_offline(False)
    checked(seen, offline=True)


# -- the host's hints ---------------------------------------------------------------------------------


@WITH_RIGHT
async def test_nothing_is_drafted_or_sent_in_the_background(world: World) -> None:
    async with answering(world) as seen:
        world.chat.tell_conditions(Conditions(background=True))
        await asyncio.sleep(1)  # what was under way arrives
        before = moved(world), len(seen.budgets)
        assert seen.pauses == [PauseReason.BACKGROUND]
        await asyncio.sleep(1000)  # the server closes silent connections long before
        assert (moved(world), len(seen.budgets)) == before
        world.chat.tell_conditions(Conditions())


@pytest.mark.parametrize("forgotten", [False, True], ids=["known", "forgotten"])
@WITH_RIGHT
async def test_a_welcome_that_comes_in_the_background_resumes_nothing_before_it_is_over(world, forgotten):
    """Neither the next draft nor, where the verifier was started anew, the conversation is sent. What the verifier
    wrote meanwhile comes with the Welcome."""
    async with answering(world) as seen:
        if forgotten:
            await world.restart(1.0)
        else:
            world.link.cut()
        swift, world.link.delay_down = world.link.delay_down, lambda: 1.0
        while world.chat.status is not LinkStatus.RECONNECTING:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.5)  # the Hello is sent, the Welcome on its way
        assert world.chat.status is LinkStatus.RECONNECTING
        before, length = (moved(world), len(seen.budgets)), len(world.chat.tokens)
        world.chat.tell_conditions(Conditions(background=True))
        await asyncio.sleep(50)
        assert world.chat.status is LinkStatus.ONLINE and seen.pauses[-1] is PauseReason.BACKGROUND
        assert (moved(world), len(seen.budgets)) == before and (len(world.chat.tokens) == length) is forgotten
        world.link.delay_down = swift
        world.chat.tell_conditions(Conditions())


@WITH_RIGHT
@UNOPENED
async def test_a_question_asked_in_the_background_is_sent_when_the_welcome_comes(world: World) -> None:
    """It brings the answer's first token; the rest comes afterwards."""
    await world.chat.open(wait=False)
    world.link.delay_down = lambda: 1.0
    await asyncio.sleep(1.5)
    world.chat.tell_conditions(Conditions(background=True))
    assert world.chat.conditions.background  # at once: the next call may be made of them
    async with answering(world, after=1) as seen:
        await asyncio.sleep(50)
        assert committed(seen.of(AnswerUpdate)[-1]) == 1 and seen.pauses[-1] is PauseReason.BACKGROUND
        world.chat.tell_conditions(Conditions())


async def test_what_the_background_interrupts_goes_on_after_it_also_without_the_verifier(world: World) -> None:
    async with answering(world) as seen:
        world.chat.tell_conditions(Conditions(background=True))
        lose(world)
        await asyncio.sleep(100)
        assert not seen.most_offline
        world.chat.tell_conditions(Conditions())
        await asyncio.sleep(1)
        assert seen.most_offline >= 8
        world.link.open = True


async def test_a_pause_that_has_another_reason_is_told_again(world: World) -> None:
    """The verdict is late, the app goes to the background and comes back, and so does the verdict."""
    async with answering(world) as seen:
        swift, world.link.delay_down = world.link.delay_down, lambda: 30.0
        await asyncio.sleep(5)
        assert seen.pauses == [PauseReason.LIMIT]
        world.chat.tell_conditions(Conditions(background=True))
        await asyncio.sleep(1)
        assert seen.pauses[1:] == [PauseReason.BACKGROUND]
        world.chat.tell_conditions(Conditions())
        await asyncio.sleep(1)
        assert seen.pauses[2:] == [PauseReason.LIMIT]
        world.link.delay_down = swift


@DEVICE_DRAFTS
@pytest.mark.parametrize("copies", [True, False], ids=["copies", "nothing to copy"])
async def test_with_low_power_drafts_are_copies_and_nothing_is_written_alone(world: World, copies: bool) -> None:
    """An empty draft to save power says nothing of what the model would write."""
    async with answering(world) as seen:
        propose = world.drafter.propose
        if not copies:
            world.drafter.propose = lambda prefix, budget, sampling: (  # type: ignore[method-assign]
                propose(prefix, budget, sampling) if budget.levels else DraftTree()
            )
        world.chat.tell_conditions(Conditions(low_power=True))
        await asyncio.sleep(0.01)
        begun, drafted = len(seen.budgets), seen.of(AnswerUpdate)[-1].statistics.drafted
        await asyncio.sleep(0.5)
        if copies:
            asked = seen.budgets[begun:]
            assert asked and all(budget.levels == 0 and budget.nodes > 1 for budget in asked)
            assert seen.of(AnswerUpdate)[-1].statistics.drafted > drafted, "copies are sent"
        lose(world)
        await asyncio.sleep(0.01)
        alone = len(seen.budgets)
        await asyncio.sleep(100)
        assert len(seen.budgets) == alone and seen.pauses == [PauseReason.LOW_POWER] and not seen.most_offline
        world.chat.tell_conditions(Conditions())
        await asyncio.sleep(1)
        assert seen.most_offline >= 8
        world.link.open = True


@DEVICE_DRAFTS
@WITH_METERED
async def test_on_a_metered_network_no_rows_are_sent_and_drafts_are_copies(world: World) -> None:
    async with answering(world) as seen:
        world.chat.tell_conditions(Conditions(metered=True))
        await asyncio.sleep(0.5)  # a connection that says so, and a few rounds
        rows, begun = world.drafter.rows, len(seen.budgets)
        await asyncio.sleep(0.5)
        asked = seen.budgets[begun:]
        assert asked and all(budget.levels == 0 for budget in asked)
        assert world.drafter.rows == rows < len(world.chat.tokens) - 1
        world.chat.tell_conditions(Conditions())
        await asyncio.sleep(0.5)
        assert world.drafter.rows > rows and seen.budgets[-1].levels > 0


async def test_rounds_without_a_draft_tell_nothing_twice(world: World) -> None:
    async with answering(world) as seen:
        world.drafter.propose = lambda prefix, budget, sampling: DraftTree()  # type: ignore[method-assign]
    updates = seen.of(AnswerUpdate)
    assert len(updates) > COUNT // 2
    assert all(one.tokens != another.tokens for one, another in pairwise(updates))


async def test_another_network_is_used_at_once(world: World) -> None:
    """The old connection is dead, which the ping would have shown long after."""
    async with answering(world) as seen:
        world.link.cut(1000.0, 1000.0)
        old = world.link.current
        await world.chat.network_changed()
        await asyncio.sleep(0.5)
        assert world.link.current is not old and world.chat.status is LinkStatus.ONLINE
        assert not seen.late
    assert seen.answer.statistics.reconnects == 1 and not seen.of(Disagreement)


async def test_another_network_ends_the_wait_between_two_attempts(world: World) -> None:
    async with answering(world):
        world.link.open = False
        world.link.cut()
        while (world.chat.link.retry_in_s or 0) < 4:
            await asyncio.sleep(0.1)
        world.link.open = True
        await world.chat.network_changed()
        await asyncio.sleep(0.5)
        assert world.chat.status is LinkStatus.ONLINE


async def test_hints_at_once_make_one_connection(world: World) -> None:
    """A change of networks has several callbacks; one of them comes while the user goes offline."""
    async with answering(world):
        chat, connect, made = world.chat, world.link.connect, 0

        async def counted(*arguments: Any, **options: Any) -> ClientEnd:
            nonlocal made
            made += 1
            return await connect(*arguments, **options)

        with mock.patch("moa_runtime.transport.connect", counted):
            await asyncio.gather(*(chat.network_changed() for _ in range(5)))
            await asyncio.sleep(1)
            assert made == 1 and chat.status is LinkStatus.ONLINE
            await asyncio.gather(chat.network_changed(), chat.work_offline(True), chat.network_changed())
            await asyncio.sleep(10)
            await chat.network_changed()
            await asyncio.sleep(10)
            assert made == 1 and chat.status is LinkStatus.OFFLINE
            await chat.work_offline(False)
            await asyncio.sleep(1)
            assert made == 2 and chat.status is LinkStatus.ONLINE
