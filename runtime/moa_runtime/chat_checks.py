"""Answers that were written without the target are checked when it is back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from moa_runtime.answer import AnswerFinished, ChatEvent, LinkStatus
from moa_runtime.chat_answers import ChatAnswers
from moa_runtime.errors import MoaError
from moa_runtime.unconfirmed import Unconfirmed


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
        the device wrote it, and is no longer unconfirmed.

        Returns:
            the answer's events, like those of :meth:`~moa_runtime.chat.Chat.send`; None where all is confirmed, or
            without a verifier.

        Raises:
            ChatError: an answer is being written, or :meth:`pending`.
        """
        self._check_idle()
        self._check_complete()
        marks = self._conversation.unconfirmed
        return self._check(marks[0]) if marks and self.status is LinkStatus.ONLINE else None

    async def _check(self, mark: Unconfirmed) -> AsyncGenerator[ChatEvent, None]:
        self._check_idle()
        conversation = self._conversation
        turns, marks = conversation.messages, conversation.unconfirmed
        written = turns[mark.turn]["content"]
        conversation.restore(turns[: mark.turn - 1])
        self._checking, finished = (turns, marks), False
        try:
            question = conversation.ask(self._loop.committed, turns[mark.turn - 1]["content"])
            draft = self.tokenizer.encode(written)

            def ask() -> None:
                self._loop.ask(question.kept, question.supplied, mark.sampling, mark.most, draft=draft)

            async with aclosing(self._ask(question, ask)) as events:
                async for event in events:
                    if isinstance(event, AnswerFinished):
                        conversation.add(turns, _left(marks, mark, turns, changed=event.text != written))
                        self._record.disputed, self._checking, finished = None, None, True
                        self._keeper.save()
                    yield event
        except MoaError:
            if self.status is LinkStatus.ONLINE:
                # Refused for good, as where the target's context has no room for it: asking again would not help.
                marks = [each for each in marks if each is not mark]
            raise
        finally:
            self._checking = None
            if not finished:
                conversation.restore(turns, marks)
                self._keeper.touch()


def _left(
    marks: Sequence[Unconfirmed], checked: Unconfirmed, turns: Sequence[dict[str, str]], *, changed: bool
) -> list[Unconfirmed]:
    """The marks behind a turn that was checked."""
    known = {mark.turn: mark for mark in marks if mark.turn > checked.turn}
    answers = range(checked.turn + 1, len(turns)) if changed else known
    return [
        known.get(turn, Unconfirmed(turn, checked.sampling, checked.most))
        for turn in answers
        if [turns[turn - 1]["role"], turns[turn]["role"]] == ["user", "assistant"]
    ]
