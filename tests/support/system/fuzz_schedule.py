"""Seeded schedules of what can happen to a conversation, and what must hold whatever happened."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moa_runtime.chat import Chat, ContextFullError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, Disagreement, FinishReason, Origin, TokenOrigin
from moa_runtime.options import DRAFTINGS
from moa_runtime.session.events import Policy, Sampling
from support.system.fuzz_happenings import HAPPENINGS
from support.system.fuzz_world import MANNERS, Limits, World, living
from support.toy_engine import STOP
from support.virtual_loop import VirtualLoop, run_virtually

#: Seconds of the virtual clock after which an answer counts as stuck.
STUCK_S = 3600.0
_QUESTIONS = ("Why?", "Name three primary colours.", "Tell me a story about a fox in a quiet forest near the river.")


@dataclass(frozen=True)
class Turn:
    """A question; ``leaves_after`` events the user stops listening, ``rewinds`` that many turns before asking."""

    text: str
    count: int
    sampling: Sampling
    leaves_after: int | None
    rewinds: int


@dataclass(frozen=True)
class Happening:
    """``name``, of :data:`HAPPENINGS`, happens ``after`` seconds; ``a`` and ``b``, 0 to 1, say how much."""

    after: float
    name: str
    a: float
    b: float


@dataclass(frozen=True)
class Schedule:
    """All of it follows from ``seed``."""

    seed: int
    limits: Limits
    turns: tuple[Turn, ...]
    happenings: tuple[Happening, ...]
    stored: bool


def schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    limits = Limits(
        manner=rng.randrange(len(MANNERS)),
        max_context=rng.choice([1000, 1000, 120]),
        stops=tuple(rng.sample(range(40, 400), rng.choice([0, 3, 20]))),
        policy=rng.choice([*Policy]),
        draft_length=rng.randint(1, 8),
        ahead=rng.choice([0, 0, 3]),
        skill=rng.choice([0.0, 0.5, 0.9, 1.0]),
        trees=rng.random() < 0.5,
        delay_s=rng.choice([0.03, 0.3, 1.0]),
        step_tokens=rng.choice([None, None, 4, 8]),
    )
    turns = []
    for _ in range(rng.randint(1, 3)):
        sampling = Sampling(0.8, 0.95, rng.randint(1, 99)) if rng.random() < 0.5 else Sampling()
        leaves = rng.randint(0, 12) if rng.random() < 0.3 else None
        turns.append(Turn(rng.choice(_QUESTIONS), rng.randint(1, 80), sampling, leaves, rng.choice([0, 0, 0, 1, 2])))
    names = sorted(HAPPENINGS)
    happenings = [
        Happening(rng.expovariate(rng.choice([20.0, 5.0, 1.0])), rng.choice(names), rng.random(), rng.random())
        for _ in range(rng.randint(0, 12))
    ]
    stored = rng.random() < 0.5
    limits = replace(
        limits,
        drafting=rng.choice(DRAFTINGS),
        server_skill=rng.choice([None, 0.0, 0.5, 0.9, 1.0]),
        credit=rng.choice([256, 16, 4]),
    )
    return Schedule(seed, limits, tuple(turns), tuple(happenings), stored)


async def _happen(world: World, happenings: Sequence[Happening]) -> None:
    """One after the other; what lasts is over before the next begins."""
    for happening in happenings:
        await asyncio.sleep(happening.after)
        await HAPPENINGS[happening.name](world, happening.a, happening.b)
    await asyncio.gather(*world.others)


async def _live(loop: VirtualLoop, plan: Schedule, happenings: Sequence[Happening], bundle: Any) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory())) / "chat.json" if plan.stored else None
        rng = random.Random(f"{plan.seed}.world")
        world = await stack.enter_async_context(living(loop, plan.limits, bundle, rng, store))
        fate = asyncio.create_task(_happen(world, happenings))
        for turn in plan.turns:
            await world.program_up.wait()
            messages = world.chat.messages
            world.chat.restore(messages[: max(0, len(messages) - 2 * turn.rewinds)])
            world.seed = turn.sampling.seed if turn.sampling.temperature else 0
            with contextlib.suppress(ContextFullError):
                await asyncio.wait_for(_turn(world, turn), STUCK_S)
        await fate
        if "jump" not in {happening.name for happening in happenings}:
            assert not world.stalled, "each end waited for the other"


async def _turn(world: World, turn: Turn) -> None:
    """Ask, and follow the answer to its end, from program to program."""
    before = len(world.chat.messages)
    ending, answering = Ending.UNHEARD, None
    while ending in (Ending.UNHEARD, Ending.KILLED):
        await world.program_up.wait()
        answering = world.chat.pending()
        if answering is None:
            assert ending is Ending.UNHEARD and len(world.chat.messages) == before, "what was shown is lost"
            answering = world.chat.send(turn.text, max_new_tokens=turn.count, sampling=turn.sampling)
        else:
            assert world.chat.question == turn.text and len(world.chat.messages) == before
        ending = await _follow(world, answering, turn)
    again = world.chat.keep_mine() if ending is Ending.DISPUTED else None
    while again is not None:
        await _follow(world, again, turn)
        await world.program_up.wait()
        again = world.chat.pending()


class Ending(enum.Enum):
    """How following an answer ended."""

    WHOLE = "it was whole"
    DISPUTED = "the same, and the user may want a dispute his own way"
    LEFT = "the user left"
    UNHEARD = "the program was killed before anything came"
    KILLED = "the program was killed"


async def _follow(world: World, answering: AsyncGenerator[ChatEvent, None], turn: Turn) -> Ending:
    """Follow an answer to its end, or leave."""
    chat, disputed, seen, last = world.chat, False, 0, None
    async with aclosing(answering) as events:
        async for event in events:
            seen += 1
            if isinstance(event, AnswerUpdate):
                assert last is None or event.tokens != last.tokens, "the same update came twice"
                last = event
            elif isinstance(event, Disagreement):
                disputed = world.rng.random() < 0.5
                if not disputed and world.rng.random() < 0.5:
                    chat.keep_mine()
            elif isinstance(event, AnswerFinished):
                _check(world, chat, event.tokens)
                _check_end(world, chat, event, turn)
                return Ending.DISPUTED if disputed else Ending.WHOLE
            if seen == turn.leaves_after:
                break
        else:
            assert not world.program_up.is_set() or world.chat is not chat, "the events ended before the answer"
            return Ending.KILLED if seen else Ending.UNHEARD
    if last is not None:
        _check(world, chat, last.tokens)
    return Ending.LEFT


def _check(world: World, chat: Chat, tokens: Sequence[TokenOrigin]) -> None:
    """What is committed is what the target writes behind what stands before it, but for what was kept."""
    start, known = chat.prompt_tokens, chat.tokens
    answer = [token for token in tokens if token.committed]
    if len(known) < start:  # left before the target had the question
        return
    prefix = known[:start]
    for token in answer:
        if token.origin is not Origin.KEPT:
            right = world.choice(prefix)
            assert token.token == right, f"at {len(prefix)} stands {token.token}, the target writes {right}"
        prefix.append(token.token)


def _check_end(world: World, chat: Chat, event: AnswerFinished, turn: Turn) -> None:
    """It ended where it should."""
    assert all(token.committed for token in event.tokens)
    figures = event.statistics
    assert figures.tokens == len(event.tokens)
    by_target = figures.tokens - figures.kept + figures.taken_back
    assert 0 <= figures.pushed + figures.fetched <= by_target
    assert 0 <= figures.accepted <= figures.drafted and figures.wasted == figures.drafted - figures.accepted
    assert 0 <= figures.server_accepted <= figures.server_drafted
    assert not figures.server_drafted or world.limits.server_skill is not None
    length = chat.prompt_tokens + len(event.tokens)
    if event.reason is FinishReason.STOP:
        assert event.tokens[-1].token == STOP
    elif event.reason is FinishReason.LENGTH:
        assert len(event.tokens) == turn.count, f"{len(event.tokens)} tokens, not {turn.count}"
    else:
        assert length >= world.limits.max_context
    assert all(token.token != STOP for token in event.tokens[:-1])


class _Records(logging.Handler):
    """Log records that tell of a fault in the program."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info or "the toy is broken" not in text:
            self.faults.append(text)


def live(plan: Schedule, bundle: Any, most: int | None = None) -> None:
    """Run a schedule, or its first ``most`` happenings. Raises whatever is wrong."""
    records = _Records()
    logging.getLogger().addHandler(records)
    try:
        run_virtually(lambda loop: _live(loop, plan, plan.happenings[:most], bundle))
    finally:
        logging.getLogger().removeHandler(records)
    assert not records.faults, records.faults


def shrunk(plan: Schedule, bundle: Any) -> tuple[Sequence[Happening], Exception] | None:
    """The shortest beginning of a schedule's happenings that fails, and how; None where all of it is fine."""
    try:
        live(plan, bundle)
        return None
    except Exception as error:
        whole = error
    for most in range(len(plan.happenings)):
        try:
            live(plan, bundle, most)
        except Exception as error:
            return plan.happenings[:most], error
    return plan.happenings, whole
