"""What writes while there is no verifier: the bundle's writer, its drafter, or nothing."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle, read_manifest, write_manifest
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, Paused, PauseReason
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.events import Sampling
from support.server.running import Verifier
from support.system.asking import (
    QUESTION,
    QUICK,
    TIMEOUT_S,
    ask,
    chatting,
    committed,
    endpoint,
    ids,
    own_decoding,
    written_offline,
)


@pytest.fixture(scope="module")
def writing(writing_bundle: Path) -> Bundle:
    return Bundle.open(writing_bundle)


async def alone(chat: Chat, text: str = QUESTION, *, count: int = 24, sampling: Sampling | None = None):
    """An answer that is asked for without a link, until nothing more is written; then the link comes. What was written
    by then, why it paused, and the answer's end."""
    offline, reasons = [], []

    def watch(event: ChatEvent) -> None:
        offline.append(written_offline(event))
        if isinstance(event, Paused):
            reasons.append(event.reason)
            chat_online.append(asyncio.create_task(chat.work_offline(False)))

    chat_online: list[asyncio.Task[None]] = []
    await chat.work_offline(True)
    answer = await ask(chat, text, count=count, sampling=sampling, watch=watch)
    await asyncio.gather(*chat_online)
    return max(offline, default=0), reasons[0], answer


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, 7)], ids=["greedy", "sampled"])
def test_a_question_that_the_verifier_never_saw_is_answered(verifier, writing, sampling):
    async def run() -> tuple[int, PauseReason, AnswerFinished, list[int]]:
        async with chatting(writing, endpoint(verifier)) as chat:
            count, reason, answer = await alone(chat, sampling=sampling)
            return count, reason, answer, own_decoding(verifier, chat, answer, 24, sampling)

    count, reason, answer, own = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert count >= 20 and reason in (PauseReason.LENGTH, PauseReason.END)
    assert ids(answer) == own
    assert answer.statistics.offline >= 1  # a random target soon chooses between equals


def test_it_goes_on_where_an_answer_was_cut(verifier: Verifier, writing: Bundle):
    async def run() -> None:
        async with chatting(writing, endpoint(verifier)) as chat:
            leaving: list[asyncio.Task[None]] = []
            seen: list[ChatEvent] = []

            def watch(event: ChatEvent) -> None:
                seen.append(event)
                if committed(event) >= 6 and not leaving:
                    leaving.append(asyncio.create_task(chat.work_offline(True)))
                if isinstance(event, Paused) and len(leaving) == 1:
                    leaving.append(asyncio.create_task(chat.work_offline(False)))

            answer = await ask(chat, count=32, watch=watch)
            assert max(map(written_offline, seen)) >= 10
            assert ids(answer) == own_decoding(verifier, chat, answer, 32, Sampling())

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize(("offline", "reason"), [("off", PauseReason.OFF), ("drafter", PauseReason.UNPREPARED)])
def test_who_wants_no_writer_gets_none(verifier: Verifier, writing: Bundle, offline, reason):
    async def run() -> tuple[int, PauseReason, AnswerFinished]:
        async with chatting(writing, endpoint(verifier), settings=replace(QUICK, offline=offline)) as chat:
            return await alone(chat)

    count, why, answer = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert (count, why) == (0, reason) and len(answer.tokens) > 0


@pytest.mark.parametrize(
    ("manners", "unconfirmed"),
    [
        (StoppingRule(0.0, 1000, 20), range(20, 21)),
        (StoppingRule(1.0, 1000, 1000), range(20)),
        (StoppingRule(0.0, 1, 1000), range(1, 40)),
    ],
    ids=["length", "doubt", "circle"],
)
def test_a_drafter_that_is_not_sure_waits(verifier: Verifier, onnx_bundle: Path, tmp_path: Path, manners, unconfirmed):
    """It says so, and the answer is the target's when it is back. What was under way when the link went counts too."""
    folder = shutil.copytree(onnx_bundle, tmp_path / "bundle")
    write_manifest(folder, replace(read_manifest(folder), manners=manners))

    async def run() -> None:
        async with chatting(Bundle.open(folder), endpoint(verifier)) as chat:
            seen: list[ChatEvent] = []
            tasks: list[asyncio.Task[None]] = []

            def watch(event: ChatEvent) -> None:
                seen.append(event)
                if committed(event) >= 4 and not tasks:
                    tasks.append(asyncio.create_task(chat.work_offline(True)))
                if isinstance(event, Paused) and len(tasks) == 1:
                    tasks.append(asyncio.create_task(chat.work_offline(False)))

            answer = await ask(chat, count=48, watch=watch)
            assert [event.reason for event in seen if isinstance(event, Paused)] == [PauseReason.UNSURE]
            waiting = next(index for index, event in enumerate(seen) if isinstance(event, Paused))
            newest = [event for event in seen[:waiting] if isinstance(event, AnswerUpdate)][-1]
            assert sum(not token.committed for token in newest.tokens) in unconfirmed
            assert ids(answer) == own_decoding(verifier, chat, answer, 48, Sampling())

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_off_writes_nothing_in_the_middle_of_an_answer_either(verifier: Verifier, bundle: Bundle):
    async def run() -> None:
        async with chatting(bundle, endpoint(verifier), settings=replace(QUICK, offline="off")) as chat:
            seen: list[ChatEvent] = []
            tasks: list[asyncio.Task[None]] = []

            def watch(event: ChatEvent) -> None:
                seen.append(event)
                if committed(event) >= 4 and not tasks:
                    tasks.append(asyncio.create_task(chat.work_offline(True)))
                if isinstance(event, Paused) and len(tasks) == 1:
                    tasks.append(asyncio.create_task(chat.work_offline(False)))

            answer = await ask(chat, count=32, watch=watch)
            assert Paused(PauseReason.OFF) in seen
            assert ids(answer) == own_decoding(verifier, chat, answer, 32, Sampling())

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
