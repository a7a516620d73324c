"""What the device wrote without the verifier: which answer is to be checked next, and what became of it."""

from __future__ import annotations

import dataclasses
import re
from difflib import SequenceMatcher

from moa_chat.desktop.answering import Answering
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_chat.words import corrected_sentence
from moa_runtime.answer import AnswerFinished


class Checking(Answering):
    """An answer while it is checked. The stored one stays until that is done.

    Attributes:
        written: the answer as the device wrote it.
        done: whether the verifier has seen all of it.
    """

    def __init__(self, chat: int, position: int, question: str, written: Message) -> None:
        sampling = written.unconfirmed.sampling if written.unconfirmed else None
        super().__init__(chat, position, question, sampling, replaces=True)
        self.written = self.message = written
        self.done = False

    @property
    def confirmed(self) -> bool:
        """Words of it do not replace the stored turns: the answer does, as a whole."""
        return False

    def place_in(self, messages: list[Message]) -> None:
        messages[self.position] = self.message

    def finish(self, event: AnswerFinished) -> None:
        super().finish(event)
        self.done = True


class Checks:
    """The unconfirmed answers of all chats.

    Attributes:
        any_done: whether there is anything to report.
        words: that were corrected since the last report.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self.any_done, self.words = False, 0
        self._before: list[tuple[int, int, Message]] = []

    def next(self, current: int | None) -> Checking | None:
        """The answer to check now, first in the ``current`` chat; None where all is confirmed.

        Raises:
            MoaError: the history cannot be read.
        """
        waiting = sorted(self._history.unconfirmed(), key=lambda one: one[0] != current)
        if not waiting:
            return None
        chat, position = waiting[0]
        messages = self._history.messages(chat)
        return Checking(chat, position, messages[position - 1].content, messages[position])

    def settle(self, checking: Checking) -> bool:
        """Store an answer that was checked, and return that it is. Answers behind one that has changed are to another
        conversation now: they are unconfirmed.

        Raises:
            MoaError: the history cannot be written.
        """
        chat, position, written = checking.chat, checking.position, checking.written
        self._history.save(chat, position, checking.message)
        self.any_done = True
        if checking.message.content == written.content or written.unconfirmed is None:
            return True
        self._before.append((chat, position, written))
        self.words += corrected_words(written.content, checking.message.content)
        for number, later in enumerate(self._history.messages(chat)):
            if number > position and later.role == "assistant" and later.unconfirmed is None:
                mark = dataclasses.replace(written.unconfirmed, turn=number)
                self._history.save(chat, number, dataclasses.replace(later, unconfirmed=mark))
        return True

    def report(self) -> tuple[str, list[tuple[int, int, Message]]]:
        """What was done since the last report, in a sentence, and the answers as they were, for :meth:`undo`."""
        before, words = self._before, self.words
        self.any_done, self.words, self._before = False, 0, []
        if not words:
            return "The verifier has confirmed what this device wrote.", before
        return corrected_sentence(words), before

    def undo(self, before: list[tuple[int, int, Message]]) -> None:
        """Put the answers back as the device wrote them; nobody checks them again.

        Raises:
            MoaError: the history cannot be written.
        """
        for chat, position, written in before:
            self._keep(chat, position, written)

    def give_up(self, checking: Checking) -> None:
        """The verifier refuses an answer, as where the conversation is too long for it: it stays, and nobody checks it
        again.

        Raises:
            MoaError: the history cannot be written.
        """
        self._keep(checking.chat, checking.position, checking.written)

    def _keep(self, chat: int, position: int, written: Message) -> None:
        kept = dataclasses.replace(written, unconfirmed=None, figures="as this device wrote it, not confirmed")
        self._history.save(chat, position, kept)


def corrected_words(before: str, after: str) -> int:
    """Words of ``before`` that are others in ``after``, or gone, and new ones between them. What follows its end is no
    correction, and punctuation does not count.

    >>> corrected_words("red, green and blue", "red, yellow and blue. That is all.")
    2
    """
    old, new = re.findall(r"\w+", before), re.findall(r"\w+", after)
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1 if i2 < len(old) else 0) for kind, i1, i2, j1, j2 in changes if kind != "equal")
