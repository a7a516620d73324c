"""Answers that the device wrote alone stay as turns, and the verifier checks them when it is back."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import AnswerUpdate, Disagreement, LinkStatus, Paused
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.tokens import common_length
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import QUESTION, ask, chatting, end_of, endpoint, ids, online

MORE = "And three more?"
SAMPLED = Sampling(0.8, 0.9, 7)
IMPOSSIBLE = (Sampling(-1.0), Sampling(0.7, 2.0), Sampling(0.7, 0.9, 1 << 64))
TURNS = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "None of them."},
    {"role": "user", "content": MORE},
    {"role": "assistant", "content": "Nor these."},
]


@pytest.fixture(scope="module")
def bundle(writing_bundle: Path) -> Bundle:
    return Bundle.open(writing_bundle)


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


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
async def test_two_answers_without_a_link_become_the_target_s(verifier, bundle, sampling):
    async with chatting(bundle, endpoint(verifier)) as other:
        for text in (QUESTION, MORE):
            await ask(other, text, count=16, sampling=sampling)
        wanted = other.messages
    async with chatting(bundle, endpoint(verifier)) as chat:
        await chat.work_offline(True)
        texts = [await write_alone(chat, text, sampling=sampling) for text in (QUESTION, MORE)]
        assert all(texts) and [each["content"] for each in chat.messages] == [QUESTION, texts[0], MORE, texts[1]]
        assert chat.unconfirmed == (Unconfirmed(1, sampling, 16), Unconfirmed(3, sampling, 16))
        assert [event async for event in chat.check()] == []  # without a verifier
        await chat.work_offline(False)
        await online(chat)
        await end_of(chat.check())
        assert [mark.turn for mark in chat.unconfirmed] == [3]
        await end_of(chat.check())
        assert chat.unconfirmed == () and [event async for event in chat.check()] == []
        assert chat.messages == wanted


async def test_an_answer_that_was_stopped_does_not_grow(chat: Chat) -> None:
    await chat.work_offline(True)
    await write_alone(chat, QUESTION, count=40, most=5)
    (mark,) = chat.unconfirmed
    assert 5 <= mark.most < 40
    await chat.work_offline(False)
    await online(chat)
    assert len((await end_of(chat.check())).tokens) <= mark.most


async def test_an_answer_that_the_verifier_refuses_keeps_no_other_from_its_check(chat: Chat) -> None:
    endless = [{"role": "user", "content": "word " * 2000}, *TURNS[1:2]]
    chat.restore([*endless, *TURNS[2:]], [Unconfirmed(1, Sampling(), 16), Unconfirmed(3, Sampling(), 16)])
    for left in (1, 0):
        with refused("context_full"):
            await end_of(chat.check())
        assert len(chat.unconfirmed) == left and chat.messages == [*endless, *TURNS[2:]]
    assert [event async for event in chat.check()] == [] and chat.status is LinkStatus.ONLINE


async def test_what_answered_a_corrected_answer_is_unconfirmed_too(verifier: Verifier, bundle: Bundle) -> None:
    async with chatting(bundle, endpoint(verifier)) as other:
        own = (await ask(other, count=16)).text
    async with chatting(bundle, endpoint(verifier)) as chat:
        long = "word " * 30
        after = [TURNS[2], {"role": "assistant", "content": long}]
        chat.restore([*TURNS[:2], *after], [Unconfirmed(1, Sampling(), 16)])
        assert (await end_of(chat.check())).text == own != TURNS[1]["content"]
        right = [TURNS[0], {"role": "assistant", "content": own}, *after]
        assert chat.messages == right
        (mark,) = chat.unconfirmed  # a check of it cuts nothing, whatever limit the first answer had
        assert mark.turn == 3 and mark.most >= len(chat.tokenizer.encode(long)) > 16
        chat.restore(right, [Unconfirmed(1, Sampling(), 16)])
        kept = await end_of(chat.check())
        as_drafted = common_length(chat.tokenizer.encode(own), ids(kept))  # a random target's text: not all of it
        assert kept.text == own and kept.statistics.offline == as_drafted > 0
        assert (chat.messages, chat.unconfirmed) == (right, ())
        await ask(chat, "And the last one?")  # the later turns are part of the conversation
        assert chat.messages[:4] == right


async def test_a_check_that_was_not_begun_in_time_does_what_there_is_to_do_then(chat: Chat) -> None:
    marks = [Unconfirmed(1, Sampling(), 16), Unconfirmed(3, Sampling(), 16)]
    chat.restore(TURNS, marks)
    heard = []
    for checks in [chat.check() for _ in range(3)]:
        heard.append([event async for event in checks])
    assert all(heard[:2]) and heard[2] == [] and chat.unconfirmed == ()
    chat.restore(TURNS, marks)
    late = chat.check()
    chat.restore([])
    assert [event async for event in late] == []


@pytest.mark.parametrize("mark", [Unconfirmed(1, Sampling(), 1 << 70), Unconfirmed(1, Sampling(), 0)])
async def test_a_limit_beyond_the_context_is_none(chat: Chat, mark: Unconfirmed) -> None:
    chat.restore(TURNS[:2], [mark])
    assert (await end_of(chat.check())).text
    assert chat.unconfirmed == ()


@pytest.mark.parametrize(
    ("mark", "code"),
    [
        *((Unconfirmed(turn, Sampling(), 0), "malformed_mark") for turn in (-1, 0, 2, 4)),
        *((Unconfirmed(1, sampling, 16), "out_of_range") for sampling in IMPOSSIBLE),
    ],
)
async def test_a_mark_is_of_an_answer_and_of_a_sampling_that_a_verifier_can_do(chat, mark, code):
    with refused(code):
        chat.restore(TURNS, [mark])


async def test_a_disagreement_of_a_check_that_was_left_is_gone(verifier: Verifier, bundle: Bundle) -> None:
    """There is nothing to keep: the answer is what it was."""
    async with chatting(bundle, endpoint(verifier), policy=Policy.ASK) as chat:
        long = "None of all these many colours is one of them. " * 3
        alone = [*TURNS[:1], {"role": "assistant", "content": long}]
        chat.restore(alone, [Unconfirmed(1, Sampling(), 400)])
        async with aclosing(chat.check()) as events:
            async for event in events:
                if isinstance(event, Disagreement):
                    break
        assert isinstance(event, Disagreement) and len(chat.unconfirmed) == 1
        assert chat.keep_mine() is None
        assert chat.messages == alone


async def test_a_check_tells_the_text_that_the_target_replaces(verifier: Verifier, bundle: Bundle) -> None:
    """From the first token on, too."""
    async with chatting(bundle, endpoint(verifier), policy=Policy.ASK) as chat:
        written = "None of all these many colours is one of them. " * 3
        chat.restore([*TURNS[:1], {"role": "assistant", "content": written}], [Unconfirmed(1, Sampling(), 400)])
        events = [event async for event in chat.check()]
        (disputed,) = (event for event in events if isinstance(event, Disagreement))
        assert (disputed.position, disputed.dropped_text) == (0, written)
        assert chat.messages[1]["content"] != written and not chat.unconfirmed
        answer = await end_of(chat.keep_mine())
        assert answer.text.startswith(written) and answer.statistics.kept
        assert chat.messages == [TURNS[0], {"role": "assistant", "content": answer.text}] and not chat.unconfirmed
    assert next(event.dropped for event in events if isinstance(event, AnswerUpdate) and event.dropped) == written


async def test_after_a_check_of_an_earlier_answer_there_is_nothing_to_keep(verifier: Verifier, bundle: Bundle) -> None:
    """The turns after it would be lost."""
    async with chatting(bundle, endpoint(verifier), policy=Policy.ASK) as chat:
        written = "None of all these many colours is one of them. " * 3
        turns = [TURNS[0], {"role": "assistant", "content": written}, *TURNS[2:]]
        chat.restore(turns, [Unconfirmed(1, Sampling(), 400)])
        await end_of(chat.check())
        assert chat.keep_mine() is None
        assert chat.messages[2:] == turns[2:]


async def test_the_next_program_checks(verifier: Verifier, bundle: Bundle, tmp_path: Path) -> None:
    """Also what the one before was about to check when it ended; but not what the user keeps."""
    store = tmp_path / "chat.json"
    async with chatting(bundle, endpoint(verifier), store=store) as chat:
        await chat.work_offline(True)
        written = await write_alone(chat, QUESTION, sampling=SAMPLED)
        await write_alone(chat, MORE)
        chat.policy = Policy.KEEP
        await write_alone(chat, "And the last one?")
    for _ in range(2):
        async with chatting(bundle, endpoint(verifier), store=store) as chat:
            assert not chat.store_problem and chat.pending() is None
            assert [each["content"] for each in chat.messages][:3] == [QUESTION, written, MORE]
            assert chat.unconfirmed == (Unconfirmed(1, SAMPLED, 16), Unconfirmed(3, Sampling(), 16))
            checks = chat.check()
            assert isinstance(await anext(checks), AnswerUpdate)
    async with chatting(bundle, endpoint(verifier), store=store) as chat:
        while chat.unconfirmed:
            await end_of(chat.check())
        checked = chat.messages
    async with chatting(bundle, endpoint(verifier), store=store) as chat:
        assert (chat.messages, chat.unconfirmed) == (checked, ())
