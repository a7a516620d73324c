"""The runtime on its own thread, and what it reports to the window."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from PySide6.QtCore import QObject, QTimer, Signal

from moa_chat.loop_thread import LoopThread, RunningAnswer, call_in_loop
from moa_runtime.conversation import Unconfirmed
from moa_runtime.errors import MoaError
from moa_runtime.events import ChatEvent, LinkChanged
from moa_runtime.options import Conditions
from moa_runtime.session.events import Sampling
from moa_runtime.sockets import is_loopback

if TYPE_CHECKING:
    from moa_runtime.chat import Chat
    from moa_runtime.manifest import RecommendedSampling

T = TypeVar("T")
Turns = list[dict[str, str]]

_BUSY_MS = 33  # events in between are handled together, so a fast stream costs no more than a slow one
_IDLE_MS = 250
_CLOSE_SECONDS = 3.0


class RuntimeThread(QObject):
    """One chat of the runtime, at most one answer of it, and jobs beside them.

    The window's thread never waits for the runtime's: a timer polls for results. ``store`` is the file that keeps an
    answer under way when the program ends.
    """

    events = Signal(list)  # of the running answer since the last tick, oldest first
    ended = Signal(object)  # the answer has no more events; with a MoaError, or None
    reopened = Signal()  # the last answer, which had ended, continues
    #: An answer was under way when the program ended last: the turns before its question, and the question.
    pending = Signal(list, str)
    link = Signal(object)  # the link's state changed

    def __init__(self, store: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._store = store
        self.chat: Chat | None = None
        self._worker = LoopThread()
        self._answer: RunningAnswer | None = None
        self._jobs: list[tuple[Future[Any], Callable[[Any], None], Callable[[MoaError], None]]] = []
        self._link: LinkChanged | None = None
        self._conditions = Conditions()
        self._far = False  # whether the verifier is on another machine
        self._timer = QTimer(self)
        self._timer.timeout.connect(self._tick)
        self._timer.start(_IDLE_MS)

    @property
    def recommended(self) -> RecommendedSampling | None:
        """Sampling that the chat's bundle recommends."""
        return self.chat.manifest.sampling if self.chat is not None else None

    @property
    def target(self) -> str:
        """The fingerprint of the chat's target; empty while there is no chat."""
        return self.chat.manifest.fingerprints.target if self.chat is not None else ""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the conversation before the answer."""
        return self.chat.prompt_tokens if self.chat is not None else 0

    @property
    def max_context(self) -> int:
        """Tokens of a conversation at most; 0 while there is no chat."""
        return self.chat.manifest.max_context if self.chat is not None else 0

    def connect_chat(
        self,
        connect: Callable[[Path | None], Coroutine[Any, Any, Chat]],
        address: str,
        done: Callable[[], None],
        failed: Callable[[MoaError], None],
    ) -> None:
        """Replace the chat by one that ``connect`` opens, given the file for an answer under way (None: no file), with
        the verifier at the URL ``address``. ``failed`` gets a MoaError; the chat before is still there."""

        def take(chat: Chat) -> None:
            before, self.chat, self._link = self.chat, chat, None
            self._far = not is_loopback(urlsplit(address).hostname or "")
            self.tell_conditions(self._conditions)
            if before is not None:
                self.run(_replace_chat(before, chat, self._store))
            done()
            if chat.pending() is not None:
                self.pending.emit(chat.messages, chat.question)

        store = self._store if self.chat is None else None  # the chat before has it until it is closed
        self.run(connect(store), take, failed)

    def ask(self, turns: Turns, question: str, *, max_new_tokens: int, sampling: Sampling) -> None:
        """Begin an answer to ``question`` after ``turns``, which replace the chat's turns."""

        def begin(chat: Chat) -> AsyncGenerator[ChatEvent, None]:
            _restore(chat, turns)
            return chat.send(question, max_new_tokens=max_new_tokens, sampling=sampling)

        self._begin(begin)

    def continue_answer(self, turns: Turns, *, max_new_tokens: int, sampling: Sampling | None) -> None:
        """Continue the answer that ``turns`` end with."""

        def begin(chat: Chat) -> AsyncGenerator[ChatEvent, None]:
            _restore(chat, turns)
            return chat.continue_answer(max_new_tokens=max_new_tokens, sampling=sampling)

        self._begin(begin)

    def check(self, turns: Turns, mark: Unconfirmed) -> None:
        """Have the verifier check an answer among ``turns``; :attr:`ended` follows at once if there is none."""

        def begin(chat: Chat) -> AsyncGenerator[ChatEvent, None]:
            chat.restore(turns, [mark])
            return chat.check()

        self._begin(begin)

    def count(self, turns: Turns, done: Callable[[int], None]) -> None:
        """Count the tokens of a conversation as if all of it were sent; ``done`` gets the number."""
        if self.chat is not None:
            self.run(_count_tokens(self.chat, turns), done)

    def left_alone(self, position: int) -> tuple[str, Unconfirmed] | None:
        """Return the answer at ``position``, just stopped, and its mark; None if the verifier has seen all of it."""
        assert self.chat is not None
        turns, marks = self.chat.messages, self.chat.unconfirmed
        last = len(turns) - 1
        if not marks or marks[-1].turn != last or last - (turns[0]["role"] == "system") != position:
            return None
        return turns[last]["content"], marks[-1]

    def follow_pending(self) -> None:
        """Continue the answer that was under way when the program ended last."""
        if self.chat is not None and self._answer is None and self.chat.pending() is not None:
            self._begin(lambda chat: chat.pending())

    def stop(self) -> None:
        """Stop the answer, and keep what is confirmed; :attr:`ended` follows."""
        if self._answer is not None:
            self._answer.stop()

    def work_offline(self, offline: bool) -> None:
        if self.chat is not None:
            self.run(self.chat.work_offline(offline))

    def tell_conditions(self, conditions: Conditions) -> None:
        """Set the conditions of this machine, for this chat and later ones. A local verifier is never metered."""
        self._conditions = conditions
        if self.chat is not None:
            told = dataclasses.replace(conditions, metered=conditions.metered and self._far)
            self.run(call_in_loop(self.chat.tell_conditions, told))

    def network_changed(self) -> None:
        """Report that the machine has another network, unless the verifier is local."""
        if self.chat is not None and self._far:
            self.run(self.chat.network_changed())

    def keep_mine(self) -> None:
        """Continue from the device's text, after the target disagreed with it."""
        if self.chat is not None:
            self.run(call_in_loop(self.chat.keep_mine), self._follow_again)

    def run(
        self,
        work: Coroutine[Any, Any, T],
        done: Callable[[T], None] = lambda _: None,
        failed: Callable[[MoaError], None] = lambda _: None,
    ) -> None:
        """Run a coroutine in the runtime's thread; ``done`` or ``failed`` is called in this one."""
        self._jobs.append((self._worker.submit(work), done, failed))
        self._timer.setInterval(_BUSY_MS)

    def close(self) -> None:
        """End the thread; wait shortly for the connection to close. An answer under way continues at the next start."""
        self._timer.stop()
        if self.chat is not None:
            with contextlib.suppress(FutureTimeoutError, CancelledError, MoaError):
                self._worker.submit(self.chat.close()).result(_CLOSE_SECONDS)
        self._worker.close()

    def _begin(self, begin: Callable[[Chat], AsyncGenerator[ChatEvent, None] | None]) -> None:
        assert self.chat is not None and self._answer is None
        self._answer = self._worker.follow(_events(self.chat, begin))
        self._timer.setInterval(_BUSY_MS)

    def _follow_again(self, events: AsyncGenerator[ChatEvent, None] | None) -> None:
        # The answer had ended, and no other has begun.
        if events is not None and self._answer is None:
            self._answer = self._worker.follow(events)
            self.reopened.emit()

    def _tick(self) -> None:
        self._take_events()
        self._take_jobs()
        if self.chat is not None and self.chat.link != self._link:
            self._link = self.chat.link
            self.link.emit(self._link)
        self._timer.setInterval(_BUSY_MS if self._answer is not None or self._jobs else _IDLE_MS)

    def _take_events(self) -> None:
        if self._answer is None:
            return
        answer, events, problem = self._answer, [], None
        try:
            events = answer.events(wait=0.0)
        except MoaError as error:
            problem = error
        if events:
            self.events.emit(events)
        if answer.ended or problem is not None:
            self._answer = None
            self.ended.emit(problem)

    def _take_jobs(self) -> None:
        ended = [job for job in self._jobs if job[0].done()]
        self._jobs = [job for job in self._jobs if not job[0].done()]
        for future, done, failed in ended:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                done(future.result())
            else:
                failed(
                    error if isinstance(error, MoaError) else MoaError(f"the program failed: {error!r}", code="defect")
                )


async def _replace_chat(before: Chat, chat: Chat, store: Path | None) -> None:
    """Close the chat before, and give its file to the new one."""
    await before.close()
    if store is not None:
        await chat.keep_in(store)


async def _count_tokens(chat: Chat, turns: Turns) -> int:
    return len(await asyncio.to_thread(chat.tokenizer.encode_chat, turns, False)) if turns else 0


async def _events(
    chat: Chat, begin: Callable[[Chat], AsyncGenerator[ChatEvent, None] | None]
) -> AsyncGenerator[ChatEvent, None]:
    """Yield the events of an answer that ``begin`` starts in the chat's own thread, if it does."""
    if (answer := begin(chat)) is not None:
        async with contextlib.aclosing(answer) as events:
            async for event in events:
                yield event


def _restore(chat: Chat, turns: Turns) -> None:
    """Give the chat these turns, unless it has them: then it also knows their origins, which would be lost."""
    if chat.messages != turns or chat.pending() is not None:
        chat.restore(turns)
