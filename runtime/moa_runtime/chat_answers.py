"""A chat's answers: followed while they are written, taken up again by the next program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from moa_runtime.answer_view import AnswerRecord
from moa_runtime.chat_keeper import ChatKeeper
from moa_runtime.chat_link import ChatLink
from moa_runtime.chat_state import AnswerState, ChatState
from moa_runtime.conversation import Conversation, Question
from moa_runtime.drafting.events import Drafted, LoopEvent, PauseBegan
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.errors import ChatError
from moa_runtime.events import AnswerFinished, AnswerUpdate, ChatEvent, LinkChanged, Paused, Statistics
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Finished, Origin, Policy, RolledBack, Welcomed
from moa_runtime.timeline import Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length
from moa_runtime.transport import Endpoint, Timing
from moa_runtime.unconfirmed import Unconfirmed


class ChatAnswers(ChatLink):
    """Answers, one after the other, and the conversation that they belong to. :class:`~moa_runtime.chat.Chat` is the
    class to use."""

    def __init__(
        self,
        session: ClientSession,
        loop: DraftingLoop,
        conversation: Conversation,
        tokenizer: ChatTokenizer,
        endpoint: Endpoint,
        timing: Timing | None,
        timeline: Timeline | None,
        keeper: ChatKeeper,
        session_id: str,
    ) -> None:
        super().__init__(loop, endpoint, timing, timeline, keeper, session_id)
        self.tokenizer = tokenizer
        self._server, self._session, self._conversation = endpoint.url, session, conversation
        self._record = self._new_record(Question([], 0, []))
        self._following = False
        self._pending = False  # an answer of another program is under way, and nobody follows it yet
        self._unheard = False  # the application has not heard the end of the record's answer
        #: While an answer is checked: turns and marks as they were, which stay until that is done.
        self._checking: tuple[list[dict[str, str]], list[Unconfirmed]] | None = None

    @property
    def question(self) -> str:
        """What is being answered, or was last; empty before the first question."""
        messages = self._record.question.messages
        return messages[-1]["content"] if messages else ""

    def pending(self) -> AsyncGenerator[ChatEvent, None] | None:
        """The answer that was under way when the program before ended: what it is the answer to says
        :attr:`question`, and :attr:`messages` are the turns before.

        Returns:
            its events, to be followed like those of :meth:`~moa_runtime.chat.Chat.send`; the first has all that was
            there. None where no answer was under way, or it is followed already.
        """
        return self._take_up() if self._pending else None

    def keep_mine(self) -> AsyncGenerator[ChatEvent, None] | None:
        """Take the answer back to the last :class:`Disagreement` and keep what the device had written there.

        The target goes on behind it. Without a disagreement nothing happens.

        Returns:
            None while the answer is being written, whose events go on; after it, the events of what is written
            now, to be followed like those of :meth:`~moa_runtime.chat.Chat.send`.
        """
        disputed, self._record.disputed = self._record.disputed, None
        if disputed is None:
            return None
        if not self._following and not self._pending:
            return self._reopen(disputed)
        self._take_back(disputed)
        return None

    async def keep_in(self, path: str | Path) -> None:
        """Store the conversation in this file from now on, in the place of what is there. To go on with what is there,
        see :meth:`~moa_runtime.chat.Chat.connect`.

        Raises:
            StoreError: this chat is stored already, another program has the file, or it cannot be used.
        """
        self._keeper.open(path, lambda content: None)
        await asyncio.wait({self._keeper.save()})

    # -- helpers -------------------------------------------------------------------------------

    def _check_idle(self) -> None:
        if self._following:
            raise ChatError("an answer is being written: stop it or wait for its end")

    def _check_complete(self) -> None:
        if self._pending:
            raise ChatError("the answer of the stored chat is not complete: follow pending(), or restore() other turns")

    def _new_record(self, question: Question) -> AnswerRecord:
        return AnswerRecord(self.tokenizer, question, self._driver.bytes_moved)

    async def _ask(
        self, question: Question, ask: Callable[[], None], known: tuple[Sequence[int], Sequence[Origin]] = ((), ())
    ) -> AsyncGenerator[ChatEvent, None]:
        """Have the loop ask, and follow the answer, of whose beginning tokens and origins may be known."""
        asked = asyncio.get_running_loop().create_future()
        self._events.clear()
        edition = self._events.ask_for_edition()

        def begin() -> None:
            self._events.begin_edition(edition)
            self._record, self._unheard = self._new_record(question), True
            self._record.resume(*known, Statistics())
            ask()
            asked.set_result(self._keeper.save())

        self._driver.post(begin)
        # Whoever has seen a part of the answer finds the question again.
        async with aclosing(self._follow(asked if self._keeper.keeps else None)) as events:
            async for event in events:
                yield event

    async def _take_up(self) -> AsyncGenerator[ChatEvent, None]:
        self._check_idle()
        self._pending = False
        async with aclosing(self._follow()) as events:
            async for event in events:
                yield event

    async def _follow(
        self, asked: asyncio.Future[asyncio.Future[None]] | None = None
    ) -> AsyncGenerator[ChatEvent, None]:
        self._following, ended = True, False
        try:
            if asked is not None and await self._done(asked):
                await self._done(asked.result())
            while not ended:
                event = await self._events.get()
                if event is None or isinstance(event, AnswerFinished):
                    self._following, ended = False, True
                if isinstance(event, AnswerFinished):
                    self._answered(event.text)
                if event is not None:
                    yield event
        finally:
            if not ended:
                try:
                    await self._stop_answer()
                finally:
                    self._following = False

    async def _reopen(self, disputed: RolledBack) -> AsyncGenerator[ChatEvent, None]:
        """Go on with an answer that has ended."""
        self._check_idle()
        self._check_accepted()
        self._conversation.restore(self._record.question.messages)
        self._record.resume_clock()
        self._take_back(disputed)
        async with aclosing(self._follow()) as events:
            async for event in events:
                yield event

    def _take_back(self, disputed: RolledBack) -> None:
        edition = self._events.ask_for_edition()

        def keep() -> None:
            self._events.begin_edition(edition)
            self._unheard = True
            self._loop.keep(disputed.start, disputed.tokens)
            self._record.take_back(disputed.start)
            self._publish()
            self._keeper.save()

        self._driver.post(keep)

    async def _stop_answer(self) -> None:
        """Cancel, and keep of question and answer what the target has confirmed, and what the device wrote without
        it."""
        if self._closed:
            return
        stopped: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

        def cancel() -> None:
            stopped.set_result(self._written_alone())
            self._loop.cancel()

        self._driver.post(cancel)
        done = await self._done(stopped)
        if self._unheard and not self._closed:
            written, most = stopped.result() if done else ("", 0)
            if written:
                kept, sampling = self.policy is Policy.KEEP, self._session.sampling
                self._conversation.set_aside(self._record.question, written, sampling, most, kept=kept)
            elif len(self._loop.committed) >= self._record.start:
                self._answered(self._record.confirmed_text())
            self._unheard = False
            self._keeper.save()

    def _written_alone(self) -> tuple[str, int]:
        """The answer as it stands and how many tokens it may have, if the device wrote of it without the verifier; else
        no text. Where it is not at its end, the user wants no more."""
        session = self._session
        if Origin.OFFLINE not in [origin for _, origin in self._loop.unconfirmed]:
            return "", 0
        update = self._record.update(self._loop.unconfirmed)
        most = session.max_new_tokens if session.tentatively_finished else session.length - session.answer_start
        return update.committed + update.tentative, most

    @property
    def _turns(self) -> tuple[list[dict[str, str]], list[Unconfirmed]]:
        """The conversation's turns, and the marks of those that are unconfirmed."""
        return self._checking or (self._conversation.messages, self._conversation.unconfirmed)

    def _answered(self, text: str) -> None:
        self._record.pause_clock()
        self._conversation.answered(self._record.question, text, len(self._loop.committed))
        self._unheard = False
        self._keeper.save()

    # -- from program to program ---------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """What the next program needs."""
        record, session, answer = self._record, self._session.snapshot(), None
        messages, unconfirmed = self._turns
        if self._unheard and not self._checking:
            question = record.question
            answer = AnswerState(
                self.question, question.kept, record.start, record.origins, record.figures(), record.ended
            )
            messages = question.messages[:-1]
            unconfirmed = [mark for mark in unconfirmed if mark.turn < len(messages)]
        same = common_length(self._conversation.messages, messages)  # the tokens of a check may be of another text
        ends = [end for end in self._conversation.ends if end[0] <= same]
        state = ChatState(self._server, session, list(messages), ends, answer, list(unconfirmed), self._session_id)
        return state.to_json()

    def _resume(self, saved: ChatState) -> None:
        """Go on where another program ended; the session does already."""
        session, answer = self._session, saved.answer
        committed = len(session.committed)
        left = committed if answer is None else answer.kept
        self._conversation.resume(saved.messages, saved.ends, left, saved.unconfirmed)
        if answer is None:
            self._record = self._new_record(Question([], 0, session.committed[: saved.session["answer_start"] or 0]))
            return
        messages = [*saved.messages, {"role": "user", "content": answer.question}]
        question = self._conversation.question(messages, session.tokens[: answer.start], answer.kept)
        record = self._record = self._new_record(question)
        record.resume(session.committed[answer.start :], answer.origins, answer.statistics)
        if not session.answering and answer.ended is None:  # the user had stopped it
            if committed >= answer.start:
                self._conversation.answered(question, record.confirmed_text(), committed)
            return
        self._unheard = self._pending = True
        self._events.publish(record.update(self._loop.unconfirmed), even_without_tokens=True)
        if answer.ended is not None:
            self._events.put(record.finish(answer.ended))
        else:
            record.statistics.reconnects += 1

    # -- what the loop says --------------------------------------------------------------------

    def _hear(self, event: LoopEvent) -> None:
        self._record.hear(event)
        if isinstance(event, Committed):
            update = self._publish()
            disagreement = self._record.disagreement(update)
            disputed = self._record.disputed
            if disputed is not None and not self._loop.may_keep(disputed.start, disputed.tokens):
                self._record.disputed = None  # where nothing can be kept, nobody is asked
            elif disagreement is not None and self.policy is Policy.ASK:
                self._events.put(disagreement)
        elif isinstance(event, Drafted):
            self._publish()
        elif isinstance(event, Finished):
            self._events.put(self._record.finish(event.reason))
        elif isinstance(event, PauseBegan):
            self._events.put(Paused(event.reason))
        elif isinstance(event, LinkChanged) and self._following:
            self._events.put(event)
        # What is kept by the user's policy nobody would write again.
        if isinstance(event, Finished | Welcomed) or (isinstance(event, Committed) and Origin.KEPT in event.origins):
            self._keeper.save()
        else:
            self._keeper.touch()
        super()._hear(event)

    def _publish(self) -> AnswerUpdate:
        update = self._record.update(self._loop.unconfirmed)
        self._events.publish(update)
        return update
