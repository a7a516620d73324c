"""An answer while it is written: from the runtime's events to a message."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from moa_chat.desktop.figures import Round, new_round, summary
from moa_chat.history.message import Dropped, Message
from moa_chat.history.store import History
from moa_runtime.answer import AnswerFinished, AnswerUpdate, Statistics
from moa_runtime.sequences import common_length


def answering_again(history: History, turns: Sequence[Mapping[str, str]], question: str) -> Answering | None:
    """The stored answer that was being written to ``question`` after ``turns``, which may begin with a system message.

    Raises:
        MoaError: the history cannot be read.
    """
    known = [*(turn for turn in turns if turn["role"] != "system"), {"role": "user", "content": question}]
    for chat, position in history.unfinished():
        if [message.turn for message in history.messages(chat)][:position] == known:
            return Answering(chat, position, question)
    return None


class Answering:
    """What is known of the answer that is being written.

    Attributes:
        chat: id of its conversation.
        position: of the answer in it.
        question: what was asked.
        replaces: the stored chat has other turns from the question on, which stay until words of this answer are
            confirmed.
        message: the answer as it stands.
        statistics: its figures.
    """

    def __init__(self, chat: int, position: int, question: str, *, replaces: bool = False) -> None:
        self.chat, self.position, self.question, self.replaces = chat, position, question, replaces
        self.message = Message("assistant", "", finished=False)
        self.statistics = Statistics()
        self._committed = ""

    @property
    def turns(self) -> list[Message]:
        """The question and the answer."""
        return [Message("user", self.question), self.message]

    @property
    def confirmed(self) -> bool:
        """Whether the target has confirmed any words."""
        return bool(self._committed or (self.message.finished and self.message.content))

    def update(self, event: AnswerUpdate) -> Round | None:
        """Take the answer as it is now; returns the verifier's rounds since the update before."""
        text = event.committed + event.tentative
        # What was kept after all stands there again.
        dropped = tuple(one for one in self.message.dropped if not text.startswith(one.text, one.offset))
        if event.dropped:
            dropped = (*dropped, Dropped(common_length(self.message.content, text), event.dropped))
        self._committed = event.committed
        self.message = Message("assistant", text, event.spans, dropped, finished=False)
        before, self.statistics = self.statistics, event.statistics
        return new_round(before, event.statistics)

    def finish(self, event: AnswerFinished) -> None:
        self.statistics = event.statistics
        figures = summary(event.statistics, event.reason)
        self.message = Message("assistant", event.text, event.spans, self.message.dropped, figures=figures)

    def stop(self) -> None:
        """It ended early: what is not confirmed goes."""
        text, left, spans = self._committed, len(self._committed), []
        for span in self.message.spans:
            if left > 0:
                spans.append(dataclasses.replace(span, text=span.text[:left]))
                left -= len(span.text)
        dropped = tuple(one for one in self.message.dropped if one.offset <= len(text))
        self.message = Message("assistant", text, tuple(spans), dropped, figures=summary(self.statistics, None))
