"""One session: a chat that asks one question after the other, and notes when it lost its verifier."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from moa_runtime.answer import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, LinkStatus
from moa_runtime.chat import Chat
from moa_runtime.session.events import Sampling

#: Of every second session; the others are greedy. Each answer has a seed of its own.
TEMPERATURE, TOP_P = 0.8, 0.95


@dataclass(frozen=True)
class Written:
    """An answer, all of whose tokens are confirmed.

    Attributes:
        prompt: the tokens before it.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Resume:
    """An answer whose connection was lost, and that went on.

    Attributes:
        lost_at: when the client knew, a reading of the monotonic clock.
        seconds: from the last confirmed token before (or the question) to the first one behind.
    """

    lost_at: float
    seconds: float


class Session:
    """Asks until it is told that there is enough.

    Args:
        number: from 0; says which question comes first, and how the target is to choose.
        questions: asked in turn, each in a new conversation of the same chat.
        on_answer: called with the number at the end of each answer.

    Attributes:
        answers: all that were finished.
        resumes: all that happened.
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
        self.resumes: list[Resume] = []
        self._confirmed = 0  # tokens of the answer
        self._last_at = 0.0  # when the last of them came, or the question was asked
        self._lost_at: float | None = None

    async def open(self) -> None:
        """Connect. Raises MoaError: the verifier refuses, or is not there."""
        await self._chat.open()

    async def close(self) -> None:
        await self._chat.close()

    async def talk(self, enough: asyncio.Event) -> None:
        """Ask. Raises MoaError: the verifier refuses."""
        for count in itertools.count():
            if enough.is_set():
                return
            await self._ask(count)
            self._on_answer(self._number)

    async def _ask(self, count: int) -> None:
        chat, question = self._chat, self._questions[(self._number + count) % len(self._questions)]
        sampling = Sampling(TEMPERATURE, TOP_P, 1000 * self._number + count) if self._number % 2 else Sampling()
        chat.restore([])
        self._confirmed, self._last_at = 0, time.monotonic()
        sending = chat.send(question, max_new_tokens=self._max_new_tokens, sampling=sampling)
        async with aclosing(sending) as events:
            async for event in events:
                self._hear(event)
                if isinstance(event, AnswerFinished):
                    tokens = tuple(token.token for token in event.tokens)
                    self.answers.append(Written(tuple(chat.tokens[: chat.prompt_tokens]), sampling, tokens))

    def _hear(self, event: ChatEvent) -> None:
        if isinstance(event, LinkChanged) and event.status is not LinkStatus.ONLINE:
            self._lost_at = self._lost_at or time.monotonic()
        if not isinstance(event, AnswerUpdate | AnswerFinished):
            return
        confirmed = sum(token.committed for token in event.tokens)
        if confirmed <= self._confirmed:
            return
        now = time.monotonic()
        if self._lost_at is not None:
            self.resumes.append(Resume(self._lost_at, now - self._last_at))
        self._confirmed, self._last_at, self._lost_at = confirmed, now, None
