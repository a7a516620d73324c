"""Answers that the device wrote alone stay as turns, and the verifier checks them when it is back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import ChatError, MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate, Disagreement, LinkStatus, Paused
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.tokens import common_length
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import QUESTION, TIMEOUT_S, ask, chatting, endpoint, ids

MORE = "And three more?"
SAMPLED = Sampling(0.8, 0.9, 7)
TURNS = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "None of them."},
    {"role": "user", "content": MORE},
    {"role": "assistant", "content": "Nor these."},
]


@pytest.fixture(scope="module")
def writing(writing_bundle: Path) -> Bundle:
    return Bundle.open(writing_bundle)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, TIMEOUT_S))


async def write_alone(chat: Chat, text: str, *, count: int = 16, most: int = 1 << 30, sampling: Sampling | None = None):
    """Ask without a link, and leave the answer at ``most`` tokens, or where the device writes no more; returns its
    text."""
    written = ""
    async with aclosing(chat.send(text, max_new_tokens=count, sampling=sampling)) as events:
        async for event in events:
            if isinstance(event, AnswerUpdate):
                written = event.tentative
            if isinstance(event, Paused) or (isinstance(event, AnswerUpdate) and len(event.tokens) >= most):
                break
    return written


async def back_online(chat: Chat) -> None:
    await chat.work_offline(False)
    while chat.status is not LinkStatus.ONLINE:
        await asyncio.sleep(0.01)


async def check(chat: Chat) -> AnswerFinished:
    checks = chat.check()
    assert checks is not None
    *_, last = [event async for event in checks]
    assert isinstance(last, AnswerFinished)
    return last


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_two_answers_without_a_link_become_the_target_s(verifier: Verifier, writing: Bundle, sampling: Sampling):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as online:
            for text in (QUESTION, MORE):
                await ask(online, text, count=16, sampling=sampling)
            wanted = online.messages
        async with chatting(writing, endpoint(verifier)) as chat:
            await chat.work_offline(True)
            texts = [await write_alone(chat, text, sampling=sampling) for text in (QUESTION, MORE)]
            assert all(texts) and [each["content"] for each in chat.messages] == [QUESTION, texts[0], MORE, texts[1]]
            assert chat.unconfirmed == (Unconfirmed(1, sampling, 16), Unconfirmed(3, sampling, 16))
            assert chat.check() is None  # without a verifier
            await back_online(chat)
            await check(chat)
            assert [mark.turn for mark in chat.unconfirmed] == [3]
            await check(chat)
            assert chat.unconfirmed == () and chat.check() is None
            assert chat.messages == wanted

    run(work())


def test_an_answer_that_was_stopped_does_not_grow(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            await chat.work_offline(True)
            await write_alone(chat, QUESTION, count=40, most=5)
            (mark,) = chat.unconfirmed
            assert 5 <= mark.most < 40
            await back_online(chat)
            assert len((await check(chat)).tokens) <= mark.most

    run(work())


def test_leaving_a_check_changes_nothing(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            marks = (Unconfirmed(1, Sampling(), 16),)
            chat.restore(TURNS, marks)
            checks = chat.check()
            assert checks is not None
            async with aclosing(checks) as events:
                async for _ in events:
                    with refused("busy", ChatError):
                        chat.check()
                    assert (chat.messages, chat.unconfirmed) == (TURNS, marks)
                    break
            assert (chat.messages, chat.unconfirmed) == (TURNS, marks)

    run(work())


def test_an_answer_that_the_verifier_refuses_keeps_no_other_from_its_check(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            endless = [{"role": "user", "content": "word " * 2000}, *TURNS[1:2]]
            chat.restore([*endless, *TURNS[2:]], [Unconfirmed(1, Sampling(), 16), Unconfirmed(3, Sampling(), 16)])
            for left in (1, 0):
                with pytest.raises(MoaError, match="context"):
                    await check(chat)
                assert len(chat.unconfirmed) == left and chat.messages == [*endless, *TURNS[2:]]
            assert chat.check() is None and chat.status is LinkStatus.ONLINE

    run(work())


def test_what_answered_a_corrected_answer_is_unconfirmed_too(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as online:
            own = (await ask(online, count=16)).text
        async with chatting(writing, endpoint(verifier)) as chat:
            chat.restore(TURNS, [Unconfirmed(1, Sampling(), 16)])
            assert (await check(chat)).text == own != TURNS[1]["content"]
            assert chat.messages == [TURNS[0], {"role": "assistant", "content": own}, *TURNS[2:]]
            assert chat.unconfirmed == (Unconfirmed(3, Sampling(), 16),)
            right = chat.messages[:2] + TURNS[2:]
            chat.restore(right, [Unconfirmed(1, Sampling(), 16)])
            kept = await check(chat)
            as_drafted = common_length(chat.tokenizer.encode(own), ids(kept))  # a random target's text: not all of it
            assert kept.text == own and kept.statistics.offline == as_drafted > 0
            assert (chat.messages, chat.unconfirmed) == (right, ())
            await ask(chat, "And the last one?")  # the turns behind are part of the conversation
            assert chat.messages[:4] == right

    run(work())


def test_a_check_of_a_short_answer_cuts_no_longer_one(verifier: Verifier, writing: Bundle):
    """The user stopped the first; what came behind was written at length."""

    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            long = "word " * 30
            chat.restore([*TURNS[:3], {"role": "assistant", "content": long}], [Unconfirmed(1, Sampling(), 3)])
            await check(chat)
            (mark,) = chat.unconfirmed
            assert mark.turn == 3 and mark.most >= len(chat.tokenizer.encode(long)) > 3

    run(work())


def test_a_check_that_was_not_begun_in_time_does_what_there_is_to_do_then(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            marks = [Unconfirmed(1, Sampling(), 16), Unconfirmed(3, Sampling(), 16)]
            chat.restore(TURNS, marks)
            heard = []
            for checks in [chat.check() for _ in range(3)]:
                assert checks is not None
                heard.append([event async for event in checks])
            assert all(heard[:2]) and heard[2] == [] and chat.unconfirmed == ()
            chat.restore(TURNS, marks)
            late = chat.check()
            assert late is not None
            chat.restore([])
            assert [event async for event in late] == []

    run(work())


@pytest.mark.parametrize("mark", [Unconfirmed(1, Sampling(), 1 << 70), Unconfirmed(1, Sampling(), 0)])
def test_a_limit_beyond_the_context_is_none(verifier: Verifier, writing: Bundle, mark: Unconfirmed):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            chat.restore(TURNS[:2], [mark])
            assert (await check(chat)).text
            assert chat.unconfirmed == ()

    run(work())


@pytest.mark.parametrize("sampling", [Sampling(-1.0), Sampling(0.7, 2.0), Sampling(0.7, 0.9, 1 << 64)])
def test_a_mark_has_a_sampling_that_a_verifier_can_do(verifier: Verifier, writing: Bundle, sampling: Sampling):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            with pytest.raises(MoaError, match=r"temperature|top_p|seed"):
                chat.restore(TURNS, [Unconfirmed(1, sampling, 16)])

    run(work())


def test_a_disagreement_of_a_check_that_was_left_is_gone(verifier: Verifier, writing: Bundle):
    """There is nothing to keep: the answer is what it was."""

    async def work() -> None:
        async with chatting(writing, endpoint(verifier), policy=Policy.ASK) as chat:
            alone = [
                *TURNS[:1],
                {"role": "assistant", "content": "None of all these many colours is one of them. " * 3},
            ]
            chat.restore(alone, [Unconfirmed(1, Sampling(), 400)])
            checks = chat.check()
            assert checks is not None
            async with aclosing(checks) as events:
                async for event in events:
                    if isinstance(event, Disagreement):
                        break
            assert isinstance(event, Disagreement) and len(chat.unconfirmed) == 1
            assert chat.keep_mine() is None
            assert chat.messages == alone

    run(work())


def test_the_file_has_no_tokens_of_a_check_beside_the_old_text(verifier: Verifier, writing: Bundle, tmp_path: Path):
    """Killed at any moment, the next program's tokens are those of its turns."""
    states: list[dict] = []

    async def work() -> None:
        async with chatting(writing, endpoint(verifier), store=tmp_path / "chat.json") as chat:
            chat.restore(TURNS, [Unconfirmed(1, Sampling(), 16)])
            save = chat._saver.save

            def watched():
                states.append(chat._state())
                return save()

            chat._saver.save = watched  # type: ignore[method-assign]
            text = (await check(chat)).text
            assert any(state["messages"] == TURNS for state in states)
            for state in states:
                turns = max(turns for turns, _ in state["ends"])
                assert turns == 0 or state["messages"][1]["content"] == text

    run(work())


def test_the_next_program_checks(verifier: Verifier, writing: Bundle, tmp_path: Path):
    """Also what the one before was about to check when it ended."""
    store = tmp_path / "chat.json"

    async def work() -> None:
        async with chatting(writing, endpoint(verifier), store=store) as chat:
            await chat.work_offline(True)
            written = await write_alone(chat, QUESTION, sampling=SAMPLED)
            await write_alone(chat, MORE)
        for _ in range(2):
            async with chatting(writing, endpoint(verifier), store=store) as chat:
                assert not chat.store_problem and chat.pending() is None
                assert [each["content"] for each in chat.messages][:3] == [QUESTION, written, MORE]
                assert chat.unconfirmed == (Unconfirmed(1, SAMPLED, 16), Unconfirmed(3, Sampling(), 16))
                checks = chat.check()
                assert checks is not None and isinstance(await anext(checks), AnswerUpdate)
        async with chatting(writing, endpoint(verifier), store=store) as chat:
            await check(chat)
            await check(chat)
            checked = chat.messages
        async with chatting(writing, endpoint(verifier), store=store) as chat:
            assert (chat.messages, chat.unconfirmed) == (checked, ())

    run(work())


def test_what_the_user_keeps_is_not_checked(verifier: Verifier, writing: Bundle):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier), policy=Policy.KEEP) as chat:
            await chat.work_offline(True)
            written = await write_alone(chat, QUESTION)
            assert chat.messages[-1]["content"] == written and chat.unconfirmed == ()

    run(work())


@pytest.mark.parametrize("turn", [-1, 0, 2, 4])
def test_a_mark_is_of_an_answer(verifier: Verifier, writing: Bundle, turn: int):
    async def work() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            with pytest.raises(MoaError, match=f"turn {turn} is not"):
                chat.restore(TURNS, [Unconfirmed(turn, Sampling(), 0)])

    run(work())
