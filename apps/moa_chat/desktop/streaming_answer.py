"""An answer while it is written: from the runtime's events to a message."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from moa_chat import strings
from moa_chat.desktop.stats_panel import Round, new_round, summary
from moa_chat.history.message import Dropped, Message
from moa_chat.history.store import History
from moa_runtime.conversation import Unconfirmed
from moa_runtime.events import AnswerFinished, AnswerUpdate, FinishReason, Origin, PauseReason, Statistics, TextSpan
from moa_runtime.session.events import Sampling
from moa_runtime.tokens import common_length


def answering_again(history: History, turns: Sequence[Mapping[str, str]], question: str) -> StreamingAnswer | None:
    """Find the stored answer that was being written to a question. Raises MoaError if that cannot be read."""
    known = [*(turn for turn in turns if turn["role"] != "system"), {"role": "user", "content": question}]
    for chat, position in history.unfinished():
        messages = history.messages(chat)
        if position < len(messages) and [message.turn for message in messages[:position]] == known:
            return StreamingAnswer(chat, position, question, messages[position].cut_off)
    return None


class StreamingAnswer:
    """The answer that is being written.

    Attributes:
        chat, position: id of its conversation, and its place there.
        sampling: of the target; None if it is not known.
        replaces: the stored chat has other turns from the question on, which stay until words of this answer are
            confirmed.
        message: the answer as it is now; ``before`` is what is continued.
        tokens: number of tokens so far; 0 before the first update.
        pause: why the device does not continue; None while it does.
    """

    def __init__(
        self,
        chat: int,
        position: int,
        question: str,
        sampling: Sampling | None,
        *,
        replaces: bool = False,
        before: Message | None = None,
    ) -> None:
        self.chat, self.position, self.question, self.replaces = chat, position, question, replaces
        self.sampling = sampling
        begun = before or Message("assistant", "")
        self.message = dataclasses.replace(begun, finished=False, figures="", cut_off=sampling)
        self.statistics = Statistics()
        self.pause: PauseReason | None = None
        self.tokens = 0
        self._before, self._committed = before, begun.content

    @property
    def turns(self) -> list[Message]:
        """The question and the answer."""
        return [Message("user", self.question), self.message]

    @property
    def shown(self) -> Message:
        """The answer as the page shows it now."""
        return self.message

    @property
    def confirmed(self) -> bool:
        """Whether the target has confirmed any words."""
        return bool(self._committed or (self.message.finished and self.message.content))

    @property
    def words_a_token(self) -> float:
        """Average number of words in a token of the text so far; below 1 in most languages."""
        return len(self.message.content.split()) / self.tokens if self.tokens else 0.0

    @property
    def ended_alone(self) -> bool:
        """Whether the device has completed it without the verifier, so that the user may ask the next question."""
        alone = any(span.origin is Origin.OFFLINE and not span.committed for span in self.message.spans)
        return alone and not self.replaces and self.pause in (PauseReason.END, PauseReason.LENGTH)

    def place_in(self, messages: list[Message]) -> None:
        """Show it among the stored messages of its chat."""
        messages[self.position - 1 :] = self.turns

    def update(self, event: AnswerUpdate) -> Round | None:
        """Take the answer as it is now; returns the verifier's rounds since the update before."""
        text = event.committed + event.tentative
        if text != self.message.content:
            self.pause = None
        self._committed, self.tokens = event.committed, len(event.tokens)
        spans = self._with_known(event.spans)
        dropped = self._marks(text, spans, event.dropped)
        self.message = Message("assistant", text, spans, dropped, finished=False, cut_off=self.sampling)
        before, self.statistics = self.statistics, event.statistics
        return new_round(before, event.statistics)

    def finish(self, event: AnswerFinished) -> None:
        self.statistics = event.statistics
        self.tokens = len(event.tokens)
        spans = self._with_known(event.spans)
        figures = summary(event.statistics, event.reason, spans)
        cut_off = self.sampling if event.reason is FinishReason.LENGTH else None
        dropped = self._marks(event.text, spans)
        self.message = Message(
            "assistant", event.text, spans, dropped, figures=figures, cut_off=cut_off, sampling=self.sampling
        )

    def set_aside(self, text: str, mark: Unconfirmed) -> None:
        """End it without the verifier, as ``text``, which is checked later."""
        shown = self.message.content
        rest = (TextSpan(text[len(shown) :], Origin.OFFLINE, False),) if text != shown else ()
        spans = (*self.message.spans, *rest) if text.startswith(shown) else ()
        # The first words may be the target's own: it confirmed them before it went away.
        words = len(text.split()) - len("".join(span.text for span in spans if span.committed).split())
        figures = strings.UNCONFIRMED_WORD if words == 1 else strings.UNCONFIRMED_WORDS.format(words)
        mark = dataclasses.replace(mark, turn=self.position)
        self.message = Message("assistant", text, spans, self._marks(text, spans), figures=figures, unconfirmed=mark)

    def stop(self) -> None:
        """End it early, and drop what is not confirmed."""
        if self._before is not None and self._committed == self._before.content:
            self.message = self._before
            return
        text, left, spans = self._committed, len(self._committed), []
        for span in self.message.spans:
            if left > 0:
                spans.append(dataclasses.replace(span, text=span.text[:left]))
                left -= len(span.text)
        dropped = tuple(one for one in self.message.dropped if one.offset <= len(text))
        figures = summary(self.statistics, None, spans)
        self.message = Message("assistant", text, tuple(spans), dropped, figures=figures, cut_off=self.sampling)

    def _marks(self, text: str, spans: Sequence[TextSpan], dropped: str = "") -> tuple[Dropped, ...]:
        """Return the marks of text that was taken back; a mark stays while the text before it does."""
        before = self.message.content
        same = common_length(before, text)
        marks = [one for one in self.message.dropped if one.offset <= same]
        if dropped:
            marks.append(Dropped(_place_of(dropped, before, text), dropped))
        # If the user kept the device's text, nothing of it was taken back.
        return tuple(one for one in marks if not text.startswith(one.text, one.offset) and not _kept(one.offset, spans))

    def _with_known(self, spans: Sequence[TextSpan]) -> tuple[TextSpan, ...]:
        """Add the stored origins of a continued answer, which the runtime may have forgotten."""
        before, kept = self._before, []
        if before is None or not before.spans or not "".join(span.text for span in spans).startswith(before.content):
            return tuple(spans)
        skipped = len(before.content)
        for span in spans:
            if skipped < len(span.text):
                kept.append(dataclasses.replace(span, text=span.text[skipped:]))
            skipped = max(0, skipped - len(span.text))
        return (*before.spans, *kept)


def _kept(offset: int, spans: Sequence[TextSpan]) -> bool:
    """Whether the user kept what stands at an offset."""
    for span in spans:
        if offset < len(span.text):
            return span.origin is Origin.KEPT
        offset -= len(span.text)
    return False


def _place_of(dropped: str, before: str, after: str) -> int:
    """Return the offset in ``after`` at which the dropped end of ``before`` began."""
    if before.endswith(dropped):
        return min(len(before) - len(dropped), len(after))
    return common_length(before, after)
