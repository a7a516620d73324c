"""What writes while there is no verifier: the bundle's writer, its drafter, or nothing."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, Paused, PauseReason
from moa_runtime.manifest import read_manifest
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.events import Sampling
from support.server.running import Verifier
from support.system.asking import QUICK, ask, ask_and_leave, chatting, endpoint, ids, own_decoding, written_offline


@pytest.fixture(scope="module")
def bundle(writing_bundle: Path) -> Bundle:
    return Bundle.open(writing_bundle)


async def alone(chat: Chat, sampling: Sampling | None = None) -> tuple[int, PauseReason, AnswerFinished]:
    """Ask without a link, which comes when nothing more is written. Return how much was, why it paused, and the end."""
    written, reasons = [], []

    def watch(event: ChatEvent) -> None:
        written.append(written_offline(event))
        if isinstance(event, Paused):
            reasons.append(event.reason)
            coming.append(asyncio.create_task(chat.work_offline(False)))

    coming: list[asyncio.Task[None]] = []
    await chat.work_offline(True)
    answer = await ask(chat, sampling=sampling, watch=watch)
    await asyncio.gather(*coming)
    return max(written), reasons[0], answer


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9, 7)], ids=["greedy", "sampled"])
async def test_a_question_that_the_verifier_never_saw_is_answered(chat: Chat, verifier: Verifier, sampling: Sampling):
    count, reason, answer = await alone(chat, sampling)
    assert count >= 20 and reason in (PauseReason.LENGTH, PauseReason.END)
    assert ids(answer) == own_decoding(verifier, chat, answer, 24, sampling)
    assert answer.statistics.offline >= 1  # a random target soon chooses between equals


async def test_it_continues_where_an_answer_was_cut(chat: Chat, verifier: Verifier) -> None:
    answer, seen = await ask_and_leave(chat, count=32, after=6)
    assert max(map(written_offline, seen)) >= 10
    assert ids(answer) == own_decoding(verifier, chat, answer, 32, Sampling())


@pytest.mark.parametrize(("offline", "reason"), [("off", PauseReason.OFF), ("drafter", PauseReason.UNPREPARED)])
async def test_the_writer_may_be_switched_off(verifier: Verifier, bundle: Bundle, offline, reason) -> None:
    async with chatting(bundle, endpoint(verifier), settings=replace(QUICK, offline=offline)) as chat:
        count, why, answer = await alone(chat)
    assert (count, why) == (0, reason) and len(answer.tokens) > 0


async def test_a_writer_that_fails_leaves_the_answer_to_drafter_and_verifier(
    verifier: Verifier, writing_bundle: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(writing_bundle, tmp_path / "bundle")
    bundle = Bundle.open(folder)
    (folder / "writer.onnx").write_bytes(b"damaged after the bundle was opened")
    async with chatting(bundle, endpoint(verifier)) as chat:
        answer, seen = await ask_and_leave(chat, count=32, after=6)
        told = [event.detail for event in seen if isinstance(event, LinkChanged) and "writer" in event.detail]
        assert len(told) == 1 and str(folder / "writer.onnx") in told[0]
        assert ids(answer) == own_decoding(verifier, chat, answer, 32, Sampling())
        count, why, answer = await alone(chat)
        assert (count, why) == (0, PauseReason.UNPREPARED) and len(answer.tokens) > 0


@pytest.mark.parametrize(
    ("rule", "offline", "reason", "unconfirmed"),
    [
        (StoppingRule(0.0, 1000, 20), "writer", PauseReason.UNSURE, range(20, 21)),
        (StoppingRule(1.0, 1000, 1000), "writer", PauseReason.UNSURE, range(20)),
        (StoppingRule(0.0, 1, 1000), "writer", PauseReason.UNSURE, range(1, 40)),
        (StoppingRule(0.0, 1000, 1000), "off", PauseReason.OFF, range(20)),
    ],
    ids=["length", "doubt", "circle", "off"],
)
async def test_a_drafter_that_may_not_go_on_says_why(
    verifier, onnx_bundle, tmp_path, rule, offline, reason, unconfirmed
):
    """The answer is the target's when it is back. What was under way when the link was lost counts too."""
    folder = shutil.copytree(onnx_bundle, tmp_path / "bundle")
    write_manifest(folder, replace(read_manifest(folder), manners=rule))
    settings = replace(QUICK, offline=offline)
    async with chatting(Bundle.open(folder), endpoint(verifier), settings=settings) as chat:
        answer, seen = await ask_and_leave(chat, count=48, after=4)
        assert [event.reason for event in seen if isinstance(event, Paused)] == [reason]
        waiting = next(index for index, event in enumerate(seen) if isinstance(event, Paused))
        newest = [event for event in seen[:waiting] if isinstance(event, AnswerUpdate)][-1]
        assert sum(not token.committed for token in newest.tokens) in unconfirmed
        assert ids(answer) == own_decoding(verifier, chat, answer, 48, Sampling())
