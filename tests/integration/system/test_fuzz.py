"""Whatever happens to link, verifier, program and user, the text is the target's own, and nothing is lost or left.

Conversations that are asked and answered, and turns that were written offline and are checked."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate, LinkStatus
from moa_runtime.session.events import Policy, Sampling
from support.system.fuzz_schedule import STUCK_S, Happening, Schedule, _check, _happen, schedule, shrunk
from support.system.fuzz_world import World, living
from support.virtual_loop import VirtualLoop, run_virtually

_QUESTIONS = ("Why?", "Name three primary colours.", "And three more, with reasons for each of them?")
_ANSWERS = ("", "No.", "Red, green and blue, for reasons that are known to all.", "ü 🎨 <|im_end|>")


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 6000), marks=pytest.mark.slow)], ids=repr)
def test_the_text_is_the_targets_own_whatever_happens(small_bundle: Any, seeds: Iterable[int]) -> None:
    for seed in seeds:
        plan = schedule(seed)
        if failure := shrunk(plan, small_bundle):
            happenings, error = failure
            told = "\n".join(map(str, happenings))
            raise AssertionError(
                f"schedule {seed} fails with {type(error).__name__}: {error}\nof {plan.limits} and {plan.turns}\n"
                f"after these happenings:\n{told}"
            ) from error


async def _live(loop: VirtualLoop, plan: Schedule, happenings: Sequence[Happening], bundle: Any, folder: Path) -> None:
    rng, limits = random.Random(f"{plan.seed}.user"), plan.limits
    if limits.policy is Policy.KEEP:
        limits = replace(limits, policy=Policy.ASK)
    sampling = Sampling(0.8, 0.95, 7) if rng.random() < 0.5 else Sampling()
    async with contextlib.AsyncExitStack() as stack:
        store = folder / f"{plan.seed}.json"
        world = await stack.enter_async_context(living(loop, limits, bundle, rng, store))
        world.seed = sampling.seed
        turns, marks = [], []
        for question in _QUESTIONS:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": rng.choice(_ANSWERS)}]
            if rng.random() < 0.6:
                marks.append(Unconfirmed(len(turns) - 1, sampling, rng.choice([1, 2, 16, 40])))
        world.chat.restore(turns, marks)
        await world.chat._saver.save()
        fate = asyncio.create_task(_happen(world, happenings))
        await asyncio.wait_for(_check_all(world, rng, turns), STUCK_S)
        await fate
        await world.program_up.wait()
        assert [turn["content"] for turn in world.chat.messages[::2]] == list(_QUESTIONS)
        session = world.chat._session
        known, ends = session.committed, world.chat._conversation.ends
        for count, length in ends[1:]:
            text = world.chat.tokenizer.decode(known[:length])
            assert world.chat.messages[count - 1]["content"].strip() in text


async def _check_all(world: World, rng: random.Random, turns: list[dict[str, str]]) -> None:
    while True:
        await world.program_up.wait()
        chat = world.chat
        before, marks = chat.messages, chat.unconfirmed
        assert [turn["role"] for turn in before] == ["user", "assistant"] * 3
        assert chat.pending() is None
        if not marks:
            return
        if chat.status is not LinkStatus.ONLINE:
            await asyncio.sleep(0.1)
            continue
        leaves, seen, done, left = rng.choice([None, None, 0, 1, 3, 8]), 0, False, False
        with contextlib.suppress(MoaError):
            async with aclosing(chat.check()) as following:
                async for event in following:
                    if isinstance(event, AnswerFinished):
                        _check(world, chat, event.tokens)
                        done = True
                        assert chat.messages[marks[0].turn]["content"] == event.text
                        assert all(mark.turn > marks[0].turn for mark in chat.unconfirmed)
                    else:
                        assert chat.messages == before and chat.unconfirmed == marks
                    seen += isinstance(event, AnswerUpdate)
                    left = seen == leaves
                    if left:
                        break
        if not done:
            assert chat.messages == before and chat.unconfirmed in ([marks] if left else [marks, marks[1:]])


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_turn_is_lost_whatever_happens_in_a_check(small_bundle: Any, tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 20):
        plan = schedule(seed)
        try:
            run_virtually(lambda loop: _live(loop, plan, plan.happenings, small_bundle, tmp_path))  # noqa: B023
        except Exception as error:
            raise AssertionError(f"schedule {seed} fails: {error!r}; {plan.limits}, {plan.happenings}") from error
