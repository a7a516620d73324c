"""Conversations that are changed between answers, and answers that are changed while they are written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat, ChatError, ContextFullError
from moa_runtime.conversation import Unconfirmed
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    ChatEvent,
    Disagreement,
    LinkChanged,
    LinkStatus,
    Origin,
    Paused,
    PauseReason,
)
from moa_runtime.options import Conditions
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.sync import SyncChat
from moa_runtime.transport import Endpoint
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import (
    QUESTION,
    TIMEOUT_S,
    ask,
    chatting,
    committed,
    endpoint,
    ids,
    own_decoding,
    written_offline,
)

SAMPLED = Sampling(0.9, 0.95, seed=7)
LONG = Sampling(0.9, 0.95, seed=1)  # which does not end the answer soon


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_an_answer_is_regenerated_alike(verifier: Verifier, bundle: Bundle, sampling: Sampling) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            supplied: list[int] = []
            chat._loop.listen(lambda event: supplied.append(event.supplied) if isinstance(event, RoundEnded) else None)
            await ask(chat, sampling=sampling)
            first = await ask(chat, "And why?", sampling=sampling)
            tokens, messages = chat.tokens, chat.messages
            chat.restore(messages[:-2])
            assert len(chat.messages) == 2 and len(chat.tokens) < len(tokens)
            again = await ask(chat, "And why?", sampling=sampling)
            assert ids(again) == ids(first) and chat.tokens == tokens and chat.messages == messages
            asked = [count for count in supplied if count]
            assert len(asked) == 3 and asked[2] <= asked[1] < asked[0] + len(first.tokens)  # what is new alone is sent

    asyncio.run(run())


def test_an_edited_question_is_answered_in_its_place(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            await ask(chat)
            await ask(chat, "And why?")
            chat.restore([])
            edited = await ask(chat, "Name three birds.")
            assert ids(edited) == own_decoding(verifier, chat, edited, 24, Sampling())
            asked = [{"role": "user", "content": "Name three birds."}]
            assert chat.tokens[: chat.prompt_tokens] == chat.tokenizer.encode_chat(asked)
            assert [m["content"] for m in chat.messages] == ["Name three birds.", edited.text]

    asyncio.run(run())


def test_a_stored_chat_is_continued(verifier: Verifier, bundle: Bundle) -> None:
    stored = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Red, yellow, blue."},
    ]

    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            await ask(chat, "Something else.")
            chat.restore(stored)
            answer = await ask(chat, "And why?")
            assert ids(answer) == own_decoding(verifier, chat, answer, 24, Sampling())
            asked = [*stored, {"role": "user", "content": "And why?"}]
            assert chat.tokens[: chat.prompt_tokens] == chat.tokenizer.encode_chat(asked)
            with refused("malformed_message"):
                chat.restore([{"role": "user"}])
            assert chat.messages == [*asked, {"role": "assistant", "content": answer.text}]

    asyncio.run(run())


def test_a_question_is_edited_and_answered_offline(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            await ask(chat)
            await ask(chat, "And why?")
            await chat.work_offline(True)
            chat.restore(chat.messages[:2])
            reconnecting = []

            def watch(event: ChatEvent) -> None:
                enough = written_offline(event) >= 6 or isinstance(event, Paused)  # it may end before
                if enough and not reconnecting:
                    reconnecting.append(asyncio.create_task(chat.work_offline(False)))

            answer = await ask(chat, "And how?", watch=watch)
            assert reconnecting and ids(answer) == own_decoding(verifier, chat, answer, 24, Sampling())

    asyncio.run(run())


async def outage(chat: Chat, *, count: int = 60, tokens: int = 12) -> AsyncIterator[ChatEvent]:
    """The events of an answer in whose middle the device works offline for some tokens."""
    went = came = False
    async for event in chat.send(QUESTION, max_new_tokens=count):
        if not went and committed(event) >= 4:
            went = True
            await chat.work_offline(True)
        if went and not came and written_offline(event) >= tokens:
            came = True
            await chat.work_offline(False)
        yield event


def test_the_text_comes_in_spans_by_origin(verifier: Verifier, bundle: Bundle) -> None:
    """Through an outage: spans join to the text, and what an update drops was at the end of the one before."""

    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            shown, dropped = "", ""
            async for event in outage(chat):
                if isinstance(event, AnswerUpdate):
                    whole = event.committed + event.tentative
                    assert "".join(span.text for span in event.spans) == whole
                    kinds = [(span.origin, span.committed) for span in event.spans]
                    assert all(kind != following for kind, following in pairwise(kinds))
                    assert shown.endswith(event.dropped)
                    shown, dropped = whole, dropped + event.dropped
            assert isinstance(event, AnswerFinished) and dropped
            assert "".join(span.text for span in event.spans) == event.text == chat.tokenizer.decode(ids(event))
            assert all(span.committed for span in event.spans)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("when", ["never", "at once", "after the answer"])
def test_the_user_is_asked_and_may_keep_what_the_device_wrote(verifier: Verifier, bundle: Bundle, when: str) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), policy=Policy.ASK) as chat:
            asked: list[Disagreement] = []
            written: list[int] = []
            answer = None
            async for event in outage(chat):
                if isinstance(event, AnswerUpdate) and written_offline(event) >= 12 and not asked:
                    written = [token.token for token in event.tokens]
                if isinstance(event, Disagreement) and not asked:
                    asked.append(event)
                    if when == "at once":
                        assert chat.keep_mine() is None
                if isinstance(event, AnswerFinished):
                    answer = event
            assert answer is not None and asked[0].dropped_text and asked[0].replacement_text
            server_text = answer.text
            assert when == "at once" or server_text[asked[0].offset :].startswith(asked[0].replacement_text)
            if when == "after the answer":
                events = chat.keep_mine()
                assert events is not None
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        answer = event
                assert answer.text[: asked[0].offset] == server_text[: asked[0].offset]
            kept = [token.token for token in answer.tokens if token.origin is Origin.KEPT]
            assert chat.messages[-1] == {"role": "assistant", "content": answer.text} and len(chat.messages) == 2
            assert answer.statistics.tokens == len(answer.tokens) and answer.statistics.kept == len(kept)
            if when == "never":
                assert not kept and ids(answer) == own_decoding(verifier, chat, answer, 60, Sampling())
                return
            position = asked[0].position
            assert ids(answer)[position : position + len(kept)] == kept
            assert kept[: len(written) - position] == written[position:]
            assert answer.text[asked[0].offset :].startswith(asked[0].dropped_text)
            # Behind what was kept stands what the target writes there.
            behind = position + len(kept)
            prefix = chat.tokens[: chat.prompt_tokens + behind]
            assert ids(answer)[behind:] == verifier.decode(prefix, 60 - behind, Sampling())
            assert chat.keep_mine() is None

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_pause_says_why_the_device_waits(verifier: Verifier, bundle: Bundle) -> None:
    async def reasons(chat: Chat, count: int) -> list[PauseReason]:
        found = []
        async for event in outage(chat, count=count, tokens=1000):
            if isinstance(event, Paused):
                found.append(event.reason)
                await chat.work_offline(False)
        return found

    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            # The limit is 40 tokens; the target may disagree and leave more to write, but is back then.
            assert await reasons(chat, 200) == [PauseReason.LIMIT]
            assert await reasons(chat, 20) in ([PauseReason.LENGTH], [PauseReason.END])

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_chat_may_begin_before_its_verifier(bundle: Bundle, verifier: Verifier, unused_port: int) -> None:
    async def run() -> None:
        nowhere = Endpoint(f"ws://127.0.0.1:{unused_port}")
        async with chatting(bundle, nowhere, wait=False) as chat:
            answer = chat.send(QUESTION)
            seen: list[ChatEvent] = []
            async for event in answer:
                seen.append(event)
                retries = [e.retry_in_s for e in seen if isinstance(e, LinkChanged) and e.retry_in_s is not None]
                if retries and any(isinstance(e, Paused) for e in seen):
                    break
            await answer.aclose()
            assert Paused(PauseReason.UNPREPARED) in seen and 0 < retries[0] < 5
            assert chat.link.status is not LinkStatus.ONLINE and chat.messages == []
        async with chatting(bundle, Endpoint(f"ws://127.0.0.1:{verifier.port}", "wrong"), wait=False) as chat:
            with refused("unauthorized", ChatError):
                await ask(chat)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_one_answer_at_a_time(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            async for event in (answer := chat.send(QUESTION, max_new_tokens=100)):
                if committed(event):
                    break
            with refused("busy", ChatError):
                await ask(chat)
            with refused("busy", ChatError):
                chat.restore([])
            await answer.aclose()
            chat.restore([])
            assert chat.tokens == []
            await ask(chat, count=4)

    asyncio.run(run())


def test_the_blocking_wrapper_restores_keeps_and_tells(verifier: Verifier, bundle: Bundle) -> None:
    with SyncChat(bundle, endpoint(verifier), threads=1) as chat:
        first = list(chat.send(QUESTION, max_new_tokens=8))[-1]
        chat.restore([])
        assert chat.keep_mine() is None
        chat.tell_conditions(Conditions(low_power=True))
        chat.network_changed()
        again = list(chat.send(QUESTION, max_new_tokens=8))[-1]
        assert isinstance(first, AnswerFinished) and isinstance(again, AnswerFinished) and again.text == first.text
        assert chat.chat.conditions.low_power


@pytest.mark.parametrize("continued", [False, True], ids=["asked", "continued"])
def test_the_event_loop_goes_on_while_a_long_text_becomes_tokens(
    small_bundle: Any, monkeypatch: pytest.MonkeyPatch, continued: bool
) -> None:
    text = "a" * 10_000

    async def run() -> None:
        chat = Chat(small_bundle, Endpoint("ws://127.0.0.1:9"), drafter=None)
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def encode(messages: object) -> list[int]:
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.3)
            return [5] * 1000

        monkeypatch.setattr(chat.tokenizer, "encode_chat", encode)
        if continued:
            chat.restore([{"role": "user", "content": text}, {"role": "assistant", "content": "b"}])
        events = chat.continue_answer() if continued else chat.send(text)
        asking = asyncio.create_task(events.__anext__())
        await begun.wait()
        assert not asking.done()
        with refused("busy", ChatError):
            chat.restore([])
        with refused("context_full", ContextFullError) as caught:
            await asking
        assert f"{1000 + continued} tokens" in str(caught.value)
        chat.restore([])

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


async def go_on(chat: Chat, **wanted: object) -> tuple[AnswerFinished, list[AnswerUpdate]]:
    """Continue the last answer to its end."""
    updates = []

    async def follow() -> AnswerFinished:
        async for event in chat.continue_answer(**wanted):
            if isinstance(event, AnswerUpdate):
                updates.append(event)
            if isinstance(event, AnswerFinished):
                return event
        raise AssertionError("no AnswerFinished")

    return await asyncio.wait_for(follow(), TIMEOUT_S), updates


@pytest.mark.parametrize("sampling", [Sampling(), LONG])
def test_a_continued_answer_is_what_a_larger_limit_gives(
    verifier: Verifier, bundle: Bundle, sampling: Sampling
) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            whole = await ask(chat, count=40, sampling=sampling)
            messages, tokens = chat.messages, chat.tokens
            chat.restore([])
            cut = await ask(chat, count=17, sampling=sampling)
            assert cut.reason.value == "length" and ids(whole)[:17] == ids(cut)
            sent: list[int] = []
            chat._loop.listen(lambda event: sent.append(event.supplied) if isinstance(event, RoundEnded) else None)
            longer, updates = await go_on(chat, max_new_tokens=23, sampling=sampling)
            assert ids(longer) == ids(whole) and longer.text == whole.text
            assert all(update.committed.startswith(cut.text) for update in updates)
            assert [token.origin for token in longer.tokens[:17]] == [token.origin for token in cut.tokens]
            assert longer.statistics.tokens == len(longer.tokens) - 17
            assert chat.messages == messages and chat.tokens == tokens
            assert max(sent) == 1, "what the verifier has is not sent again"
            after = await ask(chat, "And why?", sampling=sampling)
            assert ids(after) == own_decoding(verifier, chat, after, 24, sampling)

    asyncio.run(run())


@pytest.mark.parametrize("sampling", [Sampling(), LONG])
def test_of_a_stored_answer_the_text_is_continued(verifier: Verifier, bundle: Bundle, sampling: Sampling) -> None:
    """Its tokens are those of the text, and what follows them the target's."""

    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            cut = await ask(chat, count=17, sampling=sampling)
            stored, prompt = chat.messages, chat.tokens[: chat.prompt_tokens]
            chat.restore([])
            await ask(chat, "Something else.")
            chat.restore(stored)
            longer, _ = await go_on(chat, max_new_tokens=23, sampling=sampling)
            begun = chat.tokenizer.encode(cut.text)
            assert ids(longer) == [*begun, *verifier.decode([*prompt, *begun], 23, sampling)]
            assert longer.text.startswith(cut.text) and chat.messages[-1]["content"] == longer.text

    asyncio.run(run())


def test_a_stopped_answer_is_continued_with_the_sampling_it_had(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            whole = await ask(chat, count=40, sampling=LONG)
            chat.restore([])
            async with contextlib.aclosing(chat.send(QUESTION, max_new_tokens=40, sampling=LONG)) as events:
                async for event in events:
                    if isinstance(event, AnswerUpdate) and len(event.committed) > 10:
                        break
            stopped = chat.messages[-1]["content"]
            assert whole.text.startswith(stopped) and stopped != whole.text
            longer, _ = await go_on(chat, max_new_tokens=40 - len(chat.tokens) + chat.prompt_tokens)
            assert longer.text == whole.text

    asyncio.run(run())


def test_an_answer_is_continued_without_the_verifier_and_checked_later(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            whole = await ask(chat, count=22)
            chat.restore([])
            cut = await ask(chat, count=12)
            await chat.work_offline(True)
            async with contextlib.aclosing(chat.continue_answer(max_new_tokens=10)) as events:
                async for event in events:
                    if isinstance(event, Paused) and event.reason is PauseReason.LENGTH:
                        break
            assert chat.messages[-1]["content"].startswith(cut.text) and chat.unconfirmed[0].most == 22
            await chat.work_offline(False)
            while chat.status is not LinkStatus.ONLINE:
                await asyncio.sleep(0.01)
            checks = chat.check()
            assert checks is not None
            finished = [event async for event in checks if isinstance(event, AnswerFinished)]
            assert finished[0].text == whole.text and not chat.unconfirmed

    asyncio.run(run())


def test_what_cannot_be_continued_says_why(verifier: Verifier, bundle: Bundle) -> None:
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier)) as chat:
            with refused("nothing_to_continue", ChatError):
                await go_on(chat)
            await ask(chat, count=12)
            with refused("out_of_range", ChatError):
                await go_on(chat, sampling=Sampling(-1))
            mark = Unconfirmed(1, Sampling(), 12)
            chat.restore(chat.messages, [mark])
            with refused("unconfirmed", ChatError):
                await go_on(chat)
            chat.restore([])
            whole = await ask(chat, count=300)
            if whole.reason.value == "stop":
                with refused("nothing_to_continue", ChatError):
                    await go_on(chat)

    asyncio.run(run())


def test_a_continued_answer_outlives_the_program(verifier: Verifier, bundle: Bundle, tmp_path) -> None:
    async def run() -> None:
        store = tmp_path / "chat.json"
        async with chatting(bundle, endpoint(verifier), store=store) as chat:
            whole = await ask(chat, count=40)
            chat.restore([])
            await ask(chat, count=17)
            async for event in chat.continue_answer(max_new_tokens=23):
                if isinstance(event, AnswerUpdate):
                    await chat.close()
        async with chatting(bundle, endpoint(verifier), store=store) as chat:
            events = chat.pending()
            assert not chat.store_problem and events is not None
            async for event in events:
                if isinstance(event, AnswerFinished):
                    assert ids(event) == ids(whole)
            assert chat.messages[-1]["content"] == whole.text

    asyncio.run(run())
