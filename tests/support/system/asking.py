"""Asking a chat in tests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable

import pytest

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, LinkStatus, Origin, Paused
from moa_runtime.options import LoopSettings
from moa_runtime.session.events import AnswerSampling, Sampling
from moa_runtime.transport import Endpoint, Timing
from moa_server.engine.baseline import PlainDecoding
from support.server.running import Verifier

QUESTION = "Name three primary colours."
QUICK = LoopSettings(offline_limit=40, late_after_s=0.3, outage_after_s=0.0, drafting="device")
IMPATIENT = Timing(ping_interval=0.5, ping_timeout=0.5, first_backoff=0.05)
TIMEOUT_S = 60
#: Tests of what the device drafts while the link is up, in the toys' world.
DEVICE_DRAFTS = pytest.mark.parametrize("toys", ["device"], indirect=True)
#: Tests of a chat in that world that has not begun to connect.
UNOPENED = pytest.mark.parametrize("opened", [False], ids=["unopened"])


def endpoint(verifier: Verifier, port: int | None = None) -> Endpoint:
    return Endpoint(f"ws://127.0.0.1:{port or verifier.port}", verifier.token)


@contextlib.asynccontextmanager
async def chatting(bundle: Bundle, where: Endpoint, **options: object) -> AsyncIterator[Chat]:
    options.setdefault("settings", QUICK)
    options.setdefault("timing", IMPATIENT)
    async with await Chat.connect(bundle, where, threads=1, **options) as chat:  # type: ignore[arg-type]
        yield chat


async def ask(
    chat: Chat,
    text: str = QUESTION,
    *,
    count: int = 24,
    sampling: Sampling | None = None,
    watch: Callable[[ChatEvent], None] = lambda event: None,
) -> AnswerFinished:
    async def follow() -> AnswerFinished:
        async for event in chat.send(text, max_new_tokens=count, sampling=sampling):
            watch(event)
            if isinstance(event, AnswerFinished):
                return event
        raise AssertionError("no AnswerFinished")

    return await asyncio.wait_for(follow(), TIMEOUT_S)


async def ask_and_leave(
    chat: Chat,
    *,
    count: int,
    after: int,
    sampling: Sampling | None = None,
    until: Callable[[ChatEvent], bool] = lambda event: isinstance(event, Paused),
    watch: Callable[[ChatEvent], None] = lambda event: None,
) -> tuple[AnswerFinished, list[ChatEvent]]:
    """Ask, and work offline from ``after`` confirmed tokens to the event ``until``. Return answer and events."""
    seen: list[ChatEvent] = []
    changes: list[asyncio.Task[None]] = []

    def follow(event: ChatEvent) -> None:
        seen.append(event)
        watch(event)
        if not changes and committed(event) >= after:
            changes.append(asyncio.create_task(chat.work_offline(True)))
        if len(changes) == 1 and until(event):
            changes.append(asyncio.create_task(chat.work_offline(False)))

    answer = await ask(chat, count=count, sampling=sampling, watch=follow)
    await asyncio.gather(*changes)
    return answer, seen


async def scheduled(chat: Chat, rng: random.Random, *, count: int, sampling: Sampling) -> AnswerFinished:
    """Ask over a link that goes away or changes at a random place, or stays."""
    after, what = rng.randrange(count // 2), rng.choice(["leave", "change", "", ""])
    changes: list[asyncio.Task[None]] = []
    paused = asyncio.Event()

    async def leave() -> None:
        await chat.work_offline(True)
        # A busy machine may have lost the link before, and then the answer had paused already.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(paused.wait(), 2)
        await chat.work_offline(False)

    def watch(event: ChatEvent) -> None:
        if changes and isinstance(event, Paused):
            paused.set()
        if what and not changes and committed(event) >= after:
            changes.append(asyncio.create_task(leave() if what == "leave" else chat.network_changed()))

    answer = await ask(chat, count=count, sampling=sampling, watch=watch)
    await asyncio.gather(*changes)
    return answer


async def end_of(events: AsyncIterable[ChatEvent] | None) -> AnswerFinished:
    """Follow an answer to its end."""
    assert events is not None
    *_, last = [event async for event in events]
    assert isinstance(last, AnswerFinished)
    return last


async def online(chat: Chat) -> None:
    """Wait until the chat is connected."""
    while chat.status is not LinkStatus.ONLINE:
        await asyncio.sleep(0.01)


def own_decoding(verifier: Verifier, chat: Chat, answer: AnswerFinished, count: int, sampling: Sampling) -> list[int]:
    prompt = chat.tokens[: len(chat.tokens) - len(answer.tokens)]
    return verifier.decode(prompt, count, sampling)


async def constrained_decoding(
    verifier: Verifier, chat: Chat, answer: AnswerFinished, count: int, sampling: Sampling
) -> list[int]:
    """What the target writes alone after the same prompt: a choice a step."""
    assert sampling.grammar is not None and verifier.parts.grammars is not None
    engine, length = verifier.parts.engine, len(chat.tokens) - len(answer.tokens)
    state = verifier.parts.grammars.compile(sampling.grammar)
    own = AnswerSampling(**vars(sampling), answer_from=length, state=state)
    decoding, tokens = PlainDecoding(engine, chat.tokens[:length], own, count), list[int]()
    while (job := decoding.next()) is not None:
        [outcome] = await engine.step([request := job.request(0, 1 << 20)])
        job.take(request, outcome)
        tokens.append(decoding.take(job).token)
    engine.release(decoding.sequence)
    return tokens


def ids(answer: AnswerFinished) -> list[int]:
    return [token.token for token in answer.tokens]


def committed(event: ChatEvent) -> int:
    """Confirmed tokens of the answer in an update."""
    return sum(token.committed for token in event.tokens) if isinstance(event, AnswerUpdate) else 0


def written_offline(event: ChatEvent) -> int:
    """Unconfirmed tokens of an update that the device wrote alone."""
    tokens = event.tokens if isinstance(event, AnswerUpdate) else ()
    return sum(token.origin is Origin.OFFLINE and not token.committed for token in tokens)
