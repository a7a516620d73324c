"""Conversations that are changed between answers, and answers that are changed while they are written."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace
from itertools import pairwise

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
from moa_runtime.session.events import Policy, Sampling
from moa_runtime.transport import Endpoint
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import (
    QUESTION,
    TIMEOUT_S,
    ask,
    ask_and_leave,
    chatting,
    end_of,
    endpoint,
    ids,
    online,
    own_decoding,
    written_offline,
)

SAMPLED = Sampling(0.9, 0.95, seed=7)
LONG = Sampling(0.9, 0.95, seed=1)  # which does not end the answer soon


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
async def test_an_answer_is_regenerated_alike(chat: Chat, sampling: Sampling) -> None:
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


async def test_a_stored_chat_is_continued(chat: Chat, verifier: Verifier) -> None:
    texts = [("system", "Be brief."), ("user", QUESTION), ("assistant", "Red, yellow, blue."), ("user", "And why?")]
    stored = [{"role": role, "content": text} for role, text in texts]
    await ask(chat, "Something else.")
    chat.restore(stored[:3])
    answer = await ask(chat, "And why?")
    assert ids(answer) == own_decoding(verifier, chat, answer, 24, Sampling())
    assert chat.tokens[: chat.prompt_tokens] == chat.tokenizer.encode_chat(stored)
    with refused("malformed_message"):
        chat.restore([{"role": "user"}])
    assert chat.messages == [*stored, {"role": "assistant", "content": answer.text}]


async def test_the_text_comes_in_spans_by_origin(chat: Chat) -> None:
    """Through an outage: spans join to the text, and what an update drops was at the end of the one before."""
    shown, dropped = "", ""
    answer, events = await ask_and_leave(chat, count=60, after=4, until=lambda event: written_offline(event) >= 12)
    for event in events:
        if isinstance(event, AnswerUpdate):
            whole = event.committed + event.tentative
            assert "".join(span.text for span in event.spans) == whole
            kinds = [(span.origin, span.committed) for span in event.spans]
            assert all(kind != following for kind, following in pairwise(kinds))
            assert shown.endswith(event.dropped)
            shown, dropped = whole, dropped + event.dropped
    assert dropped and all(span.committed for span in answer.spans)
    assert "".join(span.text for span in answer.spans) == answer.text == chat.tokenizer.decode(ids(answer))


@pytest.mark.parametrize("when", ["never", "at once", "after the answer"])
async def test_the_user_is_asked_and_may_keep_what_the_device_wrote(verifier, bundle, when):
    async with chatting(bundle, endpoint(verifier), policy=Policy.ASK) as chat:
        asked: list[Disagreement] = []
        written: list[int] = []

        def watch(event: ChatEvent) -> None:
            if isinstance(event, AnswerUpdate) and written_offline(event) >= 12 and not asked:
                written[:] = [token.token for token in event.tokens]
            if isinstance(event, Disagreement) and not asked:
                asked.append(event)
                if when == "at once":
                    assert chat.keep_mine() is None

        answer, _ = await ask_and_leave(
            chat, count=60, after=4, until=lambda event: written_offline(event) >= 12, watch=watch
        )
        assert asked[0].dropped_text and asked[0].replacement_text
        server_text = answer.text
        assert when == "at once" or server_text[asked[0].offset :].startswith(asked[0].replacement_text)
        if when == "after the answer":
            answer = await end_of(chat.keep_mine())
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
        # After the kept text comes what the target writes there.
        behind = position + len(kept)
        prefix = chat.tokens[: chat.prompt_tokens + behind]
        assert ids(answer)[behind:] == verifier.decode(prefix, 60 - behind, Sampling())
        assert chat.keep_mine() is None


async def test_a_chat_may_begin_before_its_verifier(bundle: Bundle, verifier: Verifier, unused_port: int) -> None:
    nowhere = Endpoint(f"ws://127.0.0.1:{unused_port}")
    async with chatting(bundle, nowhere, wait=False) as chat:
        seen: list[ChatEvent] = []
        async with contextlib.aclosing(chat.send(QUESTION)) as events:
            async for event in events:
                seen.append(event)
                retries = [e.retry_in_s for e in seen if isinstance(e, LinkChanged) and e.retry_in_s is not None]
                if retries and any(isinstance(e, Paused) for e in seen):
                    break
        assert Paused(PauseReason.UNPREPARED) in seen and 0 < retries[0] < 5
        assert chat.link.status is not LinkStatus.ONLINE and chat.messages == []
    async with chatting(bundle, Endpoint(f"ws://127.0.0.1:{verifier.port}", "wrong"), wait=False) as chat:
        with refused("unauthorized", ChatError):
            await ask(chat)


@pytest.mark.parametrize("continued", [False, True], ids=["asked", "continued"])
async def test_the_event_loop_goes_on_while_a_long_text_becomes_tokens(small_bundle, monkeypatch, continued):
    chat, text = Chat(small_bundle, Endpoint("ws://127.0.0.1:9"), drafter=None), "a" * 10_000
    begun, seen_busy, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def encode(messages: object, **_: object) -> list[int]:
        loop.call_soon_threadsafe(begun.set)
        assert seen_busy.wait(TIMEOUT_S)
        return [5] * 1000

    monkeypatch.setattr(chat.tokenizer, "encode_chat", encode)
    if continued:
        chat.restore([{"role": "user", "content": text}, {"role": "assistant", "content": "b"}])
    events = chat.continue_answer() if continued else chat.send(text)
    asking = asyncio.create_task(events.__anext__())
    await begun.wait()
    assert not asking.done()
    seen_busy.set()
    with refused("context_full", ContextFullError) as caught:
        await asking
    assert f"{1000 + continued} tokens" in str(caught.value)


@pytest.mark.parametrize("continued", [False, True], ids=["asked", "continued"])
async def test_other_turns_take_the_place_of_a_question_that_becomes_tokens(small_bundle, monkeypatch, continued):
    chat, text = Chat(small_bundle, Endpoint("ws://127.0.0.1:9"), drafter=None), "a" * 10_000
    others = [{"role": "system", "content": "Be brief."}]
    begun, restored, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def encode(messages: object, **_: object) -> list[int]:
        loop.call_soon_threadsafe(begun.set)
        assert restored.wait(TIMEOUT_S)
        return [5] * 10

    monkeypatch.setattr(chat.tokenizer, "encode_chat", encode)
    if continued:
        chat.restore([{"role": "user", "content": text}, {"role": "assistant", "content": "b"}])
    asking = asyncio.create_task(anext(chat.continue_answer() if continued else chat.send(text), None))
    await begun.wait()
    chat.restore(others)
    restored.set()
    assert await asking is None and chat.messages == others


@pytest.mark.parametrize("sampling", [Sampling(), LONG])
async def test_a_continued_answer_is_what_a_larger_limit_gives(chat, verifier, sampling):
    whole = await ask(chat, count=40, sampling=sampling)
    messages, tokens = chat.messages, chat.tokens
    chat.restore([])
    cut = await ask(chat, count=17, sampling=sampling)
    assert cut.reason.value == "length" and ids(whole)[:17] == ids(cut)
    sent: list[int] = []
    chat._loop.listen(lambda event: sent.append(event.supplied) if isinstance(event, RoundEnded) else None)
    events = [event async for event in chat.continue_answer(max_new_tokens=23)]  # with the sampling that it had
    longer = events[-1]
    assert isinstance(longer, AnswerFinished)
    assert ids(longer) == ids(whole) and longer.text == whole.text
    assert all(event.committed.startswith(cut.text) for event in events if isinstance(event, AnswerUpdate))
    assert [token.origin for token in longer.tokens[:17]] == [token.origin for token in cut.tokens]
    assert longer.statistics.tokens == len(longer.tokens) - 17
    assert chat.messages == messages and chat.tokens == tokens
    assert max(sent) == 1, "what the verifier has is not sent again"
    after = await ask(chat, "And why?", sampling=sampling)
    assert ids(after) == own_decoding(verifier, chat, after, 24, sampling)


@pytest.mark.parametrize("sampling", [Sampling(), LONG])
async def test_of_a_stored_answer_the_text_is_continued(chat: Chat, verifier: Verifier, sampling: Sampling) -> None:
    """Its tokens are those of the text, and what follows them the target's."""
    cut = await ask(chat, count=17, sampling=sampling)
    stored, prompt = chat.messages, chat.tokens[: chat.prompt_tokens]
    chat.restore([])
    await ask(chat, "Something else.")
    chat.restore(stored)
    longer = await end_of(chat.continue_answer(max_new_tokens=23, sampling=sampling))
    begun = chat.tokenizer.encode(cut.text)
    assert ids(longer) == [*begun, *verifier.decode([*prompt, *begun], 23, sampling)]
    assert longer.text.startswith(cut.text) and chat.messages[-1]["content"] == longer.text


async def test_an_answer_is_continued_without_the_verifier_and_checked_later(chat: Chat) -> None:
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
    await online(chat)
    assert (await end_of(chat.check())).text == whole.text and not chat.unconfirmed


async def test_what_cannot_be_continued_says_why(chat: Chat) -> None:
    with refused("nothing_to_continue", ChatError):
        await end_of(chat.continue_answer())
    await ask(chat, count=12)
    with refused("out_of_range", ChatError):
        await end_of(chat.continue_answer(sampling=Sampling(-1)))
    chat.restore(chat.messages, [Unconfirmed(1, Sampling(), 12)])
    with refused("unconfirmed", ChatError):
        await end_of(chat.continue_answer())
    chat.restore([])
    whole = await ask(chat, count=300)
    if whole.reason.value == "stop":
        with refused("nothing_to_continue", ChatError):
            await end_of(chat.continue_answer())


async def test_a_continued_answer_outlives_the_program(verifier: Verifier, bundle: Bundle, tmp_path) -> None:
    store = tmp_path / "chat.json"
    async with chatting(bundle, endpoint(verifier), store=store) as chat:
        whole = await ask(chat, count=40)
        chat.restore([])
        await ask(chat, count=17)
        async for event in chat.continue_answer(max_new_tokens=23):
            if isinstance(event, AnswerUpdate):
                await chat.close()
    async with chatting(bundle, endpoint(verifier), store=store) as chat:
        assert not chat.store_problem and ids(await end_of(chat.pending())) == ids(whole)
        assert chat.messages[-1]["content"] == whole.text


async def test_a_conversation_that_outgrows_the_context_loses_its_oldest_turns(bundle, verifier):
    """What is left begins with a question and fits half of the context; the answer is the target's own to it."""
    system = [{"role": "system", "content": "Be brief."}]
    turns = [
        {"role": role, "content": f"{number} {'word ' * 9}"} for number in range(20) for role in ("user", "assistant")
    ]
    bundle = Bundle(bundle.folder, replace(bundle.manifest, max_context=400))
    async with chatting(bundle, endpoint(verifier), overflow="trim") as chat:
        assert len(chat.tokenizer.encode_chat([*system, *turns])) > 400
        chat.restore([*system, *turns])
        answer = await ask(chat, count=8)
        dropped = answer.statistics.dropped_turns
        assert dropped > 0 and dropped % 2 == 0 and len(chat.messages) == 43
        read = [*system, *turns[dropped:], {"role": "user", "content": QUESTION}]
        assert chat.tokens[: chat.prompt_tokens] == chat.tokenizer.encode_chat(read) and chat.prompt_tokens <= 200
        before = chat.tokenizer.encode_chat([*system, *turns[dropped - 2 :], read[-1]])
        assert len(before) > 200  # no turn more than that is dropped
        assert ids(answer) == own_decoding(verifier, chat, answer, 8, Sampling())
        whole = await end_of(chat.continue_answer(max_new_tokens=4))
        assert ids(whole)[:8] == ids(answer) and whole.statistics.dropped_turns == dropped
        again = await ask(chat, "And why?", count=4)  # continues: nothing is read again
        assert again.statistics.dropped_turns == dropped and chat.new_tokens < 40
        with refused("context_full", ContextFullError):
            await ask(chat, "word " * 500)
        chat.overflow = "error"
        with refused("context_full", ContextFullError):
            await ask(chat)
        chat.restore([])
        assert (await ask(chat, count=2)).statistics.dropped_turns == 0
