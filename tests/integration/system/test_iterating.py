"""Iterating an answer as programs do: leaving it without ceremony, and its text as differences."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    Disagreement,
    LinkChanged,
    Paused,
    PauseReason,
)
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.sync import SyncChat
from support.server.running import Verifier
from support.system.asking import QUESTION, TIMEOUT_S, ask, ask_and_leave, chatting, end_of, endpoint, written_offline

MARKED = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "None of them."}]


async def leave(events: AsyncGenerator[ChatEvent, None]) -> None:
    async for event in events:
        if isinstance(event, AnswerUpdate):
            break


async def end(events: AsyncGenerator[ChatEvent, None]) -> list[ChatEvent]:
    return [event async for event in events]


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
async def test_the_next_question_ends_an_answer_that_was_left(chat: Chat, held: bool) -> None:
    whole = await ask(chat, count=24)
    chat.restore([])
    kept = chat.send(QUESTION, max_new_tokens=24)
    if held:
        await leave(kept)
    else:
        del kept
        await leave(chat.send(QUESTION, max_new_tokens=24))
        gc.collect()
    await ask(chat, "And now?", count=4)
    question, left, again, _ = (turn["content"] for turn in chat.messages)
    assert (question, again) == (QUESTION, "And now?") and whole.text.startswith(left.rstrip("\ufffd"))
    if held:
        assert [event async for event in kept] == []


async def test_a_question_inside_the_loop_ends_the_loop(chat: Chat) -> None:
    async for event in chat.send(QUESTION, max_new_tokens=24):
        assert not isinstance(event, AnswerFinished)
        if isinstance(event, AnswerUpdate):
            await ask(chat, "And now?", count=4)
    assert [turn["content"] for turn in chat.messages[::2]] == [QUESTION, "And now?"]


@pytest.mark.parametrize("other", ["send", "check", "restore"])
async def test_an_iteration_that_waits_for_an_event_ends_too(chat: Chat, other: str) -> None:
    await chat.work_offline(True)
    chat.offline = "off"
    events = chat.send(QUESTION)
    assert isinstance(await anext(events), Paused)
    waiting = asyncio.create_task(end(events))
    await asyncio.sleep(0)
    if other == "send":
        assert await anext(chat.send("And now?"))
    elif other == "check":
        assert [event async for event in chat.check()] == []
    else:
        chat.restore(MARKED)
    assert not any(isinstance(event, AnswerFinished) for event in await asyncio.wait_for(waiting, TIMEOUT_S))
    assert chat.messages == (MARKED if other == "restore" else [])


async def test_two_questions_at_once_are_answered_one_after_the_other(chat: Chat) -> None:
    """The first is asked, and left when the second is asked."""
    first, second = (asyncio.create_task(end(chat.send(text, max_new_tokens=24))) for text in (QUESTION, "And now?"))
    assert isinstance((await asyncio.wait_for(second, TIMEOUT_S))[-1], AnswerFinished)
    assert not any(isinstance(event, AnswerFinished) for event in await first)
    assert [turn["content"] for turn in chat.messages[::2]][-1] == "And now?"


async def test_of_several_questions_at_once_each_ends_the_one_before(chat: Chat) -> None:
    first = asyncio.create_task(end(chat.send(QUESTION, max_new_tokens=200)))
    await asyncio.sleep(0.1)
    others = [asyncio.create_task(end(chat.send(text, max_new_tokens=8))) for text in ("And now?", "And then?")]
    await asyncio.wait_for(first, TIMEOUT_S)
    others.append(asyncio.create_task(end(chat.send("At last?", max_new_tokens=8))))
    answers = await asyncio.wait_for(asyncio.gather(*others), TIMEOUT_S)
    assert sum(isinstance(events[-1], AnswerFinished) for events in answers if events) == 1
    await ask(chat, "Once more?", count=4)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
async def test_the_users_version_of_an_answer_that_was_left_is_followed_anew(
    verifier: Verifier, writing_bundle: Path, close: bool
) -> None:
    async with chatting(Bundle.open(writing_bundle), endpoint(verifier), policy=Policy.ASK) as chat:

        async def until_disagreement() -> str:
            events, gone = chat.send(QUESTION, max_new_tokens=60), False
            async for event in events:
                if isinstance(event, AnswerUpdate) and not gone and len(event.committed) > 4:
                    await chat.work_offline(gone := True)
                if isinstance(event, AnswerUpdate) and written_offline(event) >= 12:
                    await chat.work_offline(False)
                if isinstance(event, Disagreement):
                    if close:
                        await events.aclose()
                    return event.dropped_text
            raise AssertionError("no disagreement")

        dropped = await until_disagreement()
        answer = await end_of(chat.keep_mine())
        assert dropped in answer.text and answer.statistics.kept
        assert chat.messages[-1]["content"] == answer.text and len(chat.messages) == 2


async def test_other_turns_take_the_place_of_an_answer_that_was_left(chat: Chat) -> None:
    events = chat.send(QUESTION, max_new_tokens=24)
    await leave(events)
    chat.restore(MARKED)
    await events.aclose()
    assert chat.messages == MARKED
    chat.restore(MARKED, [Unconfirmed(1, Sampling(), 16)])
    checks = chat.check()
    await leave(checks)
    assert chat.messages == MARKED
    chat.restore([])
    await checks.aclose()
    assert chat.messages == [] and chat.unconfirmed == ()


async def test_a_check_that_was_left_changes_nothing(chat: Chat) -> None:
    chat.restore(MARKED, [Unconfirmed(1, Sampling(), 16)])
    checks = chat.check()
    await leave(checks)
    own = await end_of(chat.check())
    assert chat.messages[1]["content"] == own.text and chat.unconfirmed == ()


async def test_the_texts_of_updates_are_the_answer(chat: Chat) -> None:
    for _ in range(2):  # the second answer begins anew
        seen: list[ChatEvent] = []
        answer, written = await ask(chat, count=24, watch=seen.append), ""
        updates = [event for event in seen if isinstance(event, AnswerUpdate)]
        for event in updates:
            assert event.start == len(written)
            written += event.text
            assert event.committed == written
            assert "".join(span.text for span in event.spans) == event.committed + event.tentative
        assert written == answer.text.rstrip("\ufffd") and len(updates) > 2
    more = [event async for event in chat.continue_answer(max_new_tokens=4)]
    first = next(event for event in more if isinstance(event, AnswerUpdate))
    assert (first.start, first.text[: len(written)]) == (0, written)  # an iteration begins with all that is known


async def test_an_update_says_where_the_user_s_version_begins(verifier: Verifier, writing_bundle: Path) -> None:
    async with chatting(Bundle.open(writing_bundle), endpoint(verifier), policy=Policy.ASK) as chat:
        seen: list[ChatEvent] = []

        def watch(event: ChatEvent) -> None:
            seen.append(event)
            if isinstance(event, Disagreement):
                assert chat.keep_mine() is None

        await ask_and_leave(chat, count=60, after=4, until=lambda event: written_offline(event) >= 12, watch=watch)
        written, taken_back = "", 0
        for event in seen:
            if isinstance(event, AnswerUpdate):
                taken_back += event.start < len(written)
                written = written[: event.start] + event.text
                assert written == event.committed
        assert taken_back and any(isinstance(event, Disagreement) for event in seen)


async def test_each_change_of_the_link_has_a_sentence(chat: Chat) -> None:
    changes = []
    await ask_and_leave(
        chat, count=24, after=4, watch=lambda event: changes.append(event) if isinstance(event, LinkChanged) else None
    )
    assert {change.status.value for change in changes} == {"online", "reconnecting", "offline"}
    assert all(len(change.detail.split()) > 1 for change in [*changes, chat.link])


async def test_no_pause_while_the_writer_is_about_to_write(verifier: Verifier, writing_bundle: Path) -> None:
    """A program that leaves at these pauses would leave too early."""
    async with chatting(Bundle.open(writing_bundle), endpoint(verifier)) as chat:
        for after in (0, 4):
            chat.restore([])
            seen: list[ChatEvent] = []
            if after:
                until = lambda event: written_offline(event) >= 12  # noqa: E731
                _, seen = await ask_and_leave(chat, count=40, after=after, until=until)
            else:
                await chat.work_offline(True)
                async for event in chat.send(QUESTION, max_new_tokens=20):
                    seen.append(event)
                    if isinstance(event, Paused):
                        break
                await chat.work_offline(False)
                assert any(map(written_offline, seen))
            reasons = {event.reason for event in seen if isinstance(event, Paused)}
            assert not reasons & {PauseReason.UNSURE, PauseReason.UNPREPARED}


def test_leaving_works_without_asyncio_too(verifier: Verifier, writing_bundle: Path) -> None:
    with SyncChat(Bundle.open(writing_bundle), endpoint(verifier), threads=1) as chat:
        events = chat.send(QUESTION, max_new_tokens=24)
        for event in events:
            if isinstance(event, AnswerUpdate):
                break
        assert isinstance([*chat.send("And now?", max_new_tokens=4)][-1], AnswerFinished)
        assert [*chat.check()] == []
