"""Answers that were written without the target are checked when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from moa_runtime.chat_answers import ChatAnswers
from moa_runtime.conversation import Question
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, ChatEvent, LinkStatus
from moa_runtime.unconfirmed import Unconfirmed

T = TypeVar("T")

#: Characters of a conversation that become tokens within a few milliseconds.
_LONG = 1 << 13


class ChatChecks(ChatAnswers):
    """A chat's unconfirmed turns. :class:`~moa_runtime.chat.Chat` is the class to use."""

    @property
    def unconfirmed(self) -> Sequence[Unconfirmed]:
        """The answers among :attr:`~moa_runtime.chat.Chat.messages` that :meth:`check` has something to do for, in
        order: written without the verifier, and then left, by the user or since there was nothing more to write."""
        return tuple(self._turns[1])

    def check(self) -> AsyncGenerator[ChatEvent, None] | None:
        """Have the verifier check the first of :attr:`unconfirmed`: what the device wrote there is the draft of the
        answer, and what the target would have written otherwise takes its place.

        The turns behind it stay. Where the answer changed, theirs are answers to another conversation: they are
        unconfirmed from then on. Leaving the iteration early changes nothing. One that the verifier refuses stays as
        the device wrote it, and is no longer unconfirmed. Events that are followed later are of what is the first then.

        Returns:
            the answer's events, like those of :meth:`~moa_runtime.chat.Chat.send`; None where all is confirmed, or
            without a verifier.

        Raises:
            ChatError: an answer is being written, or :meth:`pending`.
        """
        self._check_idle()
        self._check_complete()
        return self._check() if self._conversation.unconfirmed and self.status is LinkStatus.ONLINE else None

    # -- helpers -------------------------------------------------------------------------------

    async def _question(self, text: str) -> Question:
        """What to send for ``text``."""
        return await self._encoded(partial(self._conversation.ask, self._loop.committed, text), len(text))

    async def _encoded(self, encode: Callable[[], T], more: int = 0) -> T:
        """What ``encode`` makes of the conversation's turns and of ``more`` characters. Making tokens of a long one
        takes tenths of a second, in which the event loop goes on."""
        if more + sum(len(turn["content"]) for turn in self._conversation.messages) < _LONG:
            return encode()
        self._following = True  # nobody else asks, or changes the turns, meanwhile
        try:
            return await asyncio.to_thread(encode)
        finally:
            self._following = False

    async def _check(self) -> AsyncGenerator[ChatEvent, None]:
        self._check_idle()
        self._check_complete()
        conversation = self._conversation
        turns, marks = conversation.messages, conversation.unconfirmed
        if not marks:
            return
        mark = marks[0]
        written = turns[mark.turn]["content"]
        conversation.restore(turns[: mark.turn - 1])
        self._checking, finished = (turns, marks), False
        try:
            question = await self._question(turns[mark.turn - 1]["content"])
            draft, most = self.tokenizer.encode(written), min(mark.most, self._session.limits.max_context)

            def ask() -> None:
                self._loop.ask(question.kept, question.supplied, mark.sampling, most, draft=draft)

            async with aclosing(self._ask(question, ask)) as events:
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        conversation.add(turns, self._left(marks, mark, turns, changed=event.text != written))
                        self._record.disputed, self._checking, finished = None, None, True
                        self._keeper.save()
                    yield event
        except MoaError:
            if self.status is LinkStatus.ONLINE:
                # Refused for good, as where the target's context has no room for it: asking again would not help.
                marks = [each for each in marks if each is not mark]
            raise
        finally:
            self._checking = self._record.disputed = None
            if not finished:
                conversation.restore(turns, marks)
                self._keeper.touch()

    def _left(
        self, marks: Sequence[Unconfirmed], checked: Unconfirmed, turns: Sequence[dict[str, str]], *, changed: bool
    ) -> list[Unconfirmed]:
        """The marks behind a turn that was checked. Of an answer that had none nobody knows how long it may become: at
        least as long as it was."""
        known = {mark.turn: mark for mark in marks if mark.turn > checked.turn}
        left = []
        for turn in range(checked.turn + 1, len(turns)) if changed else known:
            if turn in known:
                left.append(known[turn])
            elif [turns[turn - 1]["role"], turns[turn]["role"]] == ["user", "assistant"]:
                length = len(self.tokenizer.encode(turns[turn]["content"])) + 1  # its end too
                left.append(Unconfirmed(turn, checked.sampling, max(checked.most, length) if checked.most else 0))
        return left
