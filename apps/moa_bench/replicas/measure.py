"""Many sessions, of whose two replicas one is drained and one killed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moa_bench.replicas.fleet import Fleet
from moa_bench.replicas.session import Session, Written
from moa_bench.verifier import Verifier
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling

#: Plain decodings at once.
_DECODERS = 8
_LONGEST_PHASE_S = 900.0


@dataclass
class Event:
    """Something that happened to a replica.

    Attributes:
        name: ``drained`` or ``killed``.
        at: when, a reading of the monotonic clock.
        seconds: until the replica was replaced.
    """

    name: str
    at: float
    seconds: float | None = None


@dataclass
class Results:
    """What was measured so far.

    Attributes:
        events: in their order.
        different: answers that are not the target's own.
        compared: answers that were compared with it.
        seconds: wall time, loading not included.
    """

    sessions: list[Session] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    different: list[Written] = field(default_factory=list)
    compared: int = 0
    seconds: float = 0.0


class Phases:
    """Waits until every session has finished an answer that it began in the present phase.

    Args:
        on_session: called for each session that has.
    """

    def __init__(self, sessions: int, on_session: Callable[[], object]) -> None:
        self._sessions, self._on_session = sessions, on_session
        self._answers = [0] * sessions
        self._left: set[int] = set()
        self._done = asyncio.Event()

    def begin(self) -> None:
        self._left, self._answers = set(range(self._sessions)), [0] * self._sessions
        self._done.clear()

    def answered(self, number: int) -> None:
        """A session has finished an answer; its first of a phase it may have begun in the one before."""
        self._answers[number] += 1
        if self._answers[number] == 2 and number in self._left:
            self._left.discard(number)
            self._on_session()
            if not self._left:
                self._done.set()

    async def wait(self, talking: Sequence[asyncio.Task[None]]) -> None:
        """Raises MoaError: a session failed, or it takes too long."""
        done = asyncio.ensure_future(self._done.wait())
        try:
            ended, _ = await asyncio.wait(
                {done, *talking}, timeout=_LONGEST_PHASE_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            done.cancel()
        for task in ended - {done}:
            task.result()  # it only ends by raising
        if not ended:
            raise MoaError(f"{len(self._left)} sessions finished no answer within {_LONGEST_PHASE_S:g} s")


async def measure(sessions: list[Session], phases: Phases, fleet: Fleet, results: Results) -> None:
    """Have all sessions talk; drain a replica, and kill the other, once each session has answers; until each has more.

    Raises:
        MoaError: a session, or the fleet, failed.
    """
    results.sessions, began, enough = sessions, time.monotonic(), asyncio.Event()
    talking: list[asyncio.Task[None]] = []
    try:
        for session in sessions:  # one after the other: nobody is to wait so long that it counts as an outage
            await session.open()
        talking += [asyncio.create_task(session.talk(enough)) for session in sessions]
        phases.begin()
        await phases.wait(talking)
        for name, end in (("drained", fleet.drain), ("killed", fleet.kill)):
            event = Event(name, time.monotonic())
            results.events.append(event)
            await asyncio.to_thread(end)
            await asyncio.to_thread(fleet.replace)
            event.seconds = time.monotonic() - event.at
            phases.begin()
            await phases.wait(talking)
        enough.set()
        await asyncio.gather(*talking)
    finally:
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in sessions))
        results.seconds = time.monotonic() - began


def compare(
    verifier: Verifier,
    answers: Sequence[Written],
    max_new_tokens: int,
    results: Results,
    on_answers: Callable[[int], object] = lambda count: None,
) -> None:
    """Have the target write the same answers alone.

    Args:
        on_answers: called with the number of answers that were compared since the last call.

    Raises:
        MoaError: the verifier refused, or is gone.
    """
    asked = Counter((answer.prompt, answer.sampling) for answer in answers)  # greedy ones often
    decoded: dict[tuple[tuple[int, ...], Sampling], tuple[int, ...]] = {}

    def own(question: tuple[tuple[int, ...], Sampling]) -> tuple[int, ...]:
        prompt, sampling = question
        return tuple(verifier.decode(prompt, max_new_tokens, sampling))

    with ThreadPoolExecutor(_DECODERS) as decoders:
        for (question, count), tokens in zip(asked.items(), decoders.map(own, asked), strict=True):
            decoded[question] = tokens
            on_answers(count)
    results.compared = len(answers)
    results.different = [each for each in answers if each.tokens != decoded[each.prompt, each.sampling]]
