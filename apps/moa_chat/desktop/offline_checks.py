"""Answers that the device wrote without the verifier: which one is checked next, and what the check changed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import groupby

from moa_chat import strings
from moa_chat.desktop.streaming_answer import StreamingAnswer
from moa_chat.history.message import Message
from moa_chat.history.store import History
from moa_runtime.events import AnswerFinished, Origin, TextSpan
from moa_runtime.tokens import common_length

_WORD = re.compile("\\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}]\\w+)*")


class AnswerCheck(StreamingAnswer):
    """An answer that is being checked; ``written`` is the stored one of the device, which is shown until the end."""

    def __init__(self, chat: int, position: int, question: str, written: Message) -> None:
        sampling = written.unconfirmed.sampling if written.unconfirmed else None
        super().__init__(chat, position, question, sampling, replaces=True)
        self.written, self.message = written, dataclasses.replace(written, dropped=())
        self.done = False  # whether the verifier has seen all of it
        self.gone = False  # whether its chat was deleted meanwhile

    @property
    def confirmed(self) -> bool:
        """False: the stored answer is replaced as a whole, when the check has ended."""
        return False

    @property
    def shown(self) -> Message:
        return self.message if self.done else dataclasses.replace(self.written, figures=strings.CHECKING)

    def place_in(self, messages: list[Message]) -> None:
        messages[self.position] = self.shown

    def finish(self, event: AnswerFinished) -> None:
        super().finish(event)
        spans = with_confirmed_origins(self.message.spans, self.written)
        self.message = dataclasses.replace(self.message, spans=spans)
        self.done = True


@dataclasses.dataclass(frozen=True)
class Corrected:
    """An answer in its chat, as the device wrote it and as the target did."""

    chat: int
    position: int
    written: Message
    checked: Message


class OfflineChecks:
    """The unconfirmed answers of all chats."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.any_done = False  # whether there is anything to report
        self._words = 0  # that were corrected since the last report
        self._corrected: list[Corrected] = []

    def next(self, current: int | None, target: str) -> AnswerCheck | None:
        """Return the answer to check next, those of the ``current`` chat first; None if there is none. Answers for
        another target than ``target`` wait for that one. Raises MoaError if the history cannot be read."""
        waiting = sorted(self._history.unconfirmed(), key=lambda one: one[0] != current)
        for chat, position in waiting:
            messages = self._history.messages(chat)
            turns = messages[position - 1 : position + 1]
            if [turn.role for turn in turns] != ["user", "assistant"] or turns[1].unconfirmed is None:
                continue  # damaged
            if turns[1].target in ("", target):
                return AnswerCheck(chat, position, turns[0].content, turns[1])
        return None

    def settle(self, checking: AnswerCheck, most: int) -> bool:
        """Store an answer that was checked, and return True. If it has changed, the later answers of the same target
        become unconfirmed, as they follow another text now, and may have ``most`` tokens. Raises MoaError, with
        nothing changed, if the history cannot be written."""
        chat, position, written = checking.chat, checking.position, checking.written
        checked, mark = dataclasses.replace(checking.message, target=written.target), written.unconfirmed
        if checked.content == written.content or mark is None:
            self._history.save(chat, position, checked)
            self.any_done = True
            return True
        most = max(mark.most, most) if mark.most else 0
        following = self._history.messages(chat)[position + 1 :]
        for number, later in enumerate(following):
            same = not later.target or later.target == written.target
            if later.role == "assistant" and later.unconfirmed is None and same:
                turn, sampling = position + 1 + number, later.sampling or later.cut_off or mark.sampling
                new = dataclasses.replace(mark, turn=turn, sampling=sampling, most=most)
                following[number] = dataclasses.replace(later, unconfirmed=new)
        self._history.replace(chat, position, [checked, *following])
        self.any_done = True
        self._note(Corrected(chat, position, written, checked))
        self._words += corrected_words(written, checked.content)
        return True

    def report(self) -> tuple[str, list[Corrected]]:
        """Return what was done since the last report, as a sentence, and the corrected answers for :meth:`undo`."""
        corrected, words = self._corrected, self._words
        self.any_done, self._words, self._corrected = False, 0, []
        if not words:
            return strings.ALL_CONFIRMED, []
        return strings.corrected_sentence(words), corrected

    def undo(self, corrected: list[Corrected]) -> bool:
        """Restore the answers as the device wrote them, without another check, and return whether all are restored:
        answers that have changed since stay. Raises MoaError if the history cannot be written."""
        back = 0
        for one in corrected:
            there = self._history.messages(one.chat)[one.position : one.position + 1]
            if [message.content for message in there] == [one.checked.content]:
                self._keep(one.chat, one.position, one.written)
                back += 1
        return back == len(corrected)

    def give_up(self, checking: AnswerCheck) -> bool:
        """Keep an answer that the verifier refuses, for example as too long, without another check; return True. Raises
        MoaError if the history cannot be written."""
        self._keep(checking.chat, checking.position, checking.written)
        return True

    def _note(self, corrected: Corrected) -> None:
        """Note an answer that changed; if it was checked twice, keep the first text of the device."""
        for number, one in enumerate(self._corrected):
            same = (one.chat, one.position) == (corrected.chat, corrected.position)
            if same and one.checked.content == corrected.written.content:
                self._corrected[number] = dataclasses.replace(one, checked=corrected.checked)
                return
        self._corrected.append(corrected)

    def _keep(self, chat: int, position: int, written: Message) -> None:
        """Store the device's text as final, without the marks of text that was taken back."""
        alone = not all(span.committed for span in written.spans) or not written.spans
        figures = strings.AS_WRITTEN if alone else written.figures
        self._history.save(chat, position, dataclasses.replace(written, unconfirmed=None, figures=figures, dropped=()))


def with_confirmed_origins(spans: Sequence[TextSpan], written: Message) -> tuple[TextSpan, ...]:
    """Return the checked text's spans, in which text that the target had confirmed in ``written`` keeps its origin.

    A check hands the whole answer to the target, so that all of it seems to be the device's.
    """
    text = "".join(span.text for span in spans)
    origins = [span.origin for span in spans for _ in span.text]
    known = [span for span in written.spans for _ in span.text]
    for at in range(common_length(text, written.content) if known else 0):
        if known[at].committed:
            origins[at] = known[at].origin
    marked = groupby(zip(text, origins, strict=True), key=lambda one: one[1])
    return tuple(TextSpan("".join(letter for letter, _ in letters), origin, True) for origin, letters in marked)


def corrected_words(written: Message, after: str) -> int:
    """Return the number of words that the device wrote and that are replaced or missing in ``after``, with new ones
    between them. Text after the end, punctuation, and words of the server do not count.

    >>> corrected_words(Message("assistant", "red, green and blue"), "red, yellow and blue. That is all.")
    1
    """
    words, new = list(_WORD.finditer(written.content)), _WORD.findall(after)
    old, ours = [word.group() for word in words], _written_here(written)
    mine = [any(ours[word.start() : word.end()]) for word in words]
    count = 0
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal" and all(mine[i1 : max(i2, i1 + 1)]):
            count += max(i2 - i1, j2 - j1 if i2 < len(old) else 0)
        elif kind != "equal":
            count += sum(mine[i1:i2])
    return min(count, sum(mine))  # the server's may be more


def _written_here(message: Message) -> list[bool]:
    """Return for each character whether the device wrote it without the server; all, if no origins are known."""
    if not message.spans:
        return [True] * len(message.content)
    alone = (Origin.OFFLINE, Origin.KEPT)
    return [not span.committed or span.origin in alone for span in message.spans for _ in span.text]
