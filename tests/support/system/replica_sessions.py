"""Chats that ask without a pause while one replica drains and the other dies, and a check of every text."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from moa_bench.verifier import Verifier
from moa_runtime.chat import Chat
from moa_runtime.events import AnswerFinished, LinkChanged, LinkStatus
from moa_runtime.session.events import Sampling
from support.system.replica_fleet import Fleet

#: Every second session samples with these, and with another seed for each answer; the others are greedy.
TEMPERATURE, TOP_P = 0.8, 0.95
_DECODERS = 8
_LONGEST_PHASE_S = 900.0


@dataclass(frozen=True)
class Written:
    """An answer with confirmed tokens only; ``prompt`` is the tokens before it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]


class Session:
    """A chat that asks one question after the other, each in a new conversation.

    Args:
        number: from 0; chooses the first question and the sampling.
        on_answer: called with the number at the end of each answer.

    Attributes:
        answers: the finished ones.
        resumed: answers whose connection was lost and that continued.
    """

    def __init__(
        self,
        number: int,
        chat: Chat,
        questions: Sequence[str],
        max_new_tokens: int,
        on_answer: Callable[[int], None],
    ) -> None:
        self._number, self._chat, self._questions = number, chat, questions
        self._max_new_tokens, self._on_answer = max_new_tokens, on_answer
        self.answers: list[Written] = []
        self.resumed = 0

    async def open(self) -> None:
        """Connect. Raises MoaError if the verifier refuses or cannot be reached."""
        await self._chat.open()

    async def close(self) -> None:
        await self._chat.close()

    async def talk(self, enough: asyncio.Event) -> None:
        """Ask until ``enough`` is set. Raises MoaError if the verifier refuses."""
        for count in itertools.count():
            if enough.is_set():
                return
            await self._ask(count)
            self._on_answer(self._number)

    async def _ask(self, count: int) -> None:
        chat, question = self._chat, self._questions[(self._number + count) % len(self._questions)]
        sampling = Sampling(TEMPERATURE, TOP_P, 1000 * self._number + count) if self._number % 2 else Sampling()
        chat.restore([])
        lost = False
        sending = chat.send(question, max_new_tokens=self._max_new_tokens, sampling=sampling)
        async with aclosing(sending) as events:
            async for event in events:
                lost |= isinstance(event, LinkChanged) and event.status is not LinkStatus.ONLINE
                if isinstance(event, AnswerFinished):
                    tokens = tuple(token.token for token in event.tokens)
                    self.answers.append(Written(tuple(chat.tokens[: chat.prompt_tokens]), sampling, tokens))
                    self.resumed += lost


class Phases:
    """Waits until every session has finished an answer that it began in the current phase."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._answers = [0] * sessions
        self._left: set[int] = set()
        self._done = asyncio.Event()

    def begin(self) -> None:
        self._left, self._answers = set(range(self._sessions)), [0] * self._sessions
        self._done.clear()

    def answered(self, number: int) -> None:
        """Count a session's answer; its first one of a phase may have begun in the phase before."""
        self._answers[number] += 1
        if self._answers[number] == 2:
            self._left.discard(number)
            if not self._left:
                self._done.set()

    async def wait(self, talking: Sequence[asyncio.Task[None]]) -> None:
        """Raises MoaError if a session failed, AssertionError after 900 s."""
        done = asyncio.ensure_future(self._done.wait())
        try:
            ended, _ = await asyncio.wait(
                {done, *talking}, timeout=_LONGEST_PHASE_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            done.cancel()
        for task in ended - {done}:
            task.result()  # a session ends by raising
        assert ended, f"{len(self._left)} sessions finished no answer within {_LONGEST_PHASE_S:g} s"


async def talk_through(sessions: Sequence[Session], phases: Phases, fleet: Fleet) -> dict[str, int]:
    """Let all sessions talk; drain a replica once each session has an answer, then kill the other one.

    Returns:
        answers that lost their connection and continued, by event (``drained``, ``killed``).
    """
    enough, talking, resumed = asyncio.Event(), list[asyncio.Task[None]](), dict[str, int]()
    try:
        for session in sessions:  # one after the other: a chat that waits too long reports an outage
            await session.open()
        talking += [asyncio.create_task(session.talk(enough)) for session in sessions]
        phases.begin()
        await phases.wait(talking)
        for name, end in (("drained", fleet.drain), ("killed", fleet.kill)):
            before = sum(session.resumed for session in sessions)
            await asyncio.to_thread(end)
            await asyncio.to_thread(fleet.replace)
            phases.begin()
            await phases.wait(talking)
            resumed[name] = sum(session.resumed for session in sessions) - before
        enough.set()
        await asyncio.gather(*talking)
    finally:
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await asyncio.gather(*(session.close() for session in sessions))
    return resumed


def different(verifier: Verifier, answers: Sequence[Written], max_new_tokens: int) -> list[Written]:
    """Return the answers that differ from the target's plain decoding; each question is decoded once."""
    asked = list(dict.fromkeys((answer.prompt, answer.sampling) for answer in answers))
    with ThreadPoolExecutor(_DECODERS) as decoders:
        decoded = decoders.map(lambda each: tuple(verifier.decode(each[0], max_new_tokens, each[1])), asked)
        expected = dict(zip(asked, decoded, strict=True))
    return [each for each in answers if each.tokens != expected[each.prompt, each.sampling]]
