"""One answer from its question to its end: tokens with their origins, text and figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from moa_runtime.answer_text import AnswerText, shared_word
from moa_runtime.conversation import Question
from moa_runtime.drafting.events import Drafted, LinkLost, LoopEvent, Pushed, RoundEnded
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    Disagreement,
    FinishReason,
    Origin,
    Statistics,
    TokenOrigin,
)
from moa_runtime.session.events import Cause, Committed, Decided, RolledBack
from moa_runtime.tokenizer import ChatTokenizer

#: Tokens written offline. A verdict that is a little late often overtakes a few, about which nobody wants to be asked.
_WORTH_ASKING = 8


class AnswerRecord:
    """Made when the question is sent.

    Args:
        question: what is answered.
        bytes_moved: payload bytes sent and received so far, those of earlier answers included.

    Attributes:
        start: absolute position of the answer's first token.
        statistics: its figures.
        disputed: what was rolled back in the last :class:`~moa_runtime.events.Disagreement`.
        ended: how it ended, None while it runs.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, question: Question, bytes_moved: Callable[[], tuple[int, int]]
    ) -> None:
        self.question = question
        self.start = question.length
        self.statistics = Statistics()
        self.disputed: RolledBack | None = None
        self.ended: FinishReason | None = None
        self._stop_tokens = tokenizer.stop_tokens
        self._tokens: list[TokenOrigin] = []
        self._settled = 0  # how many of them were shown
        self._text = AnswerText(tokenizer, question.behind)
        self._rolled_back: RolledBack | None = None
        self._fetched = self._pushed = False  # how what is committed next came
        self._bytes_moved, self._bytes_before = bytes_moved, bytes_moved()
        self._asked_at = time.monotonic()
        self._ended_at = self._asked_at

    def resume(self, tokens: Sequence[int], origins: Sequence[Origin], statistics: Statistics) -> None:
        """Go on with the answer of another program: its confirmed tokens, where these came from, and its figures. The
        time between the programs does not count."""
        self._tokens = [TokenOrigin(t, o, True) for t, o in zip(tokens, origins, strict=True)]
        self.statistics = statistics
        up, down = self._bytes_before
        self._bytes_before = up - statistics.bytes_up, down - statistics.bytes_down
        self._asked_at -= statistics.seconds

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of the confirmed tokens."""
        return tuple(token.origin for token in self._tokens)

    def figures(self) -> Statistics:
        """The answer's figures as they are now."""
        up, down = self._bytes_moved()
        self.statistics.bytes_up, self.statistics.bytes_down = up - self._bytes_before[0], down - self._bytes_before[1]
        self.statistics.seconds = time.monotonic() - self._asked_at
        return self.statistics.snapshot()

    def hear(self, event: LoopEvent) -> None:
        """Take what the drafting loop tells."""
        statistics = self.statistics
        if isinstance(event, Decided):
            self._fetched = event.cause is Cause.FETCHED
            self._pushed = event.cause is Cause.PUSHED
        elif isinstance(event, Committed):
            self._commit(event)
        elif isinstance(event, RolledBack):  # what the target wrote instead is committed next
            self._rolled_back = event
            statistics.rolled_back += len(event.tokens)
        elif isinstance(event, Drafted):
            statistics.draft_seconds += event.seconds
        elif isinstance(event, RoundEnded | Pushed):
            statistics.rounds += 1
            statistics.round_trips.append(event.waited_s)
            statistics.wait_seconds += event.waited_s
            statistics.server_drafts = isinstance(event, Pushed)
            if statistics.server_drafts:
                statistics.server_drafted += event.drafted
                statistics.server_accepted += event.accepted
            else:
                statistics.drafted += event.drafted
                statistics.accepted += event.accepted
        elif isinstance(event, LinkLost):
            statistics.reconnects += 1

    def _commit(self, event: Committed) -> None:
        statistics = self.statistics
        if event.tokens and statistics.first_token_seconds is None:
            statistics.first_token_seconds = time.monotonic() - self._asked_at
        kept = sum(origin is Origin.KEPT for origin in event.origins)
        statistics.tokens += len(event.tokens)
        statistics.kept += kept
        statistics.fetched += len(event.tokens) - kept if self._fetched else 0
        statistics.pushed += len(event.tokens) - kept if self._pushed else 0
        statistics.offline += kept + sum(origin is Origin.OFFLINE for origin in event.origins)
        self._tokens += [TokenOrigin(t, o, True) for t, o in zip(event.tokens, event.origins, strict=True)]

    def update(self, unconfirmed: Sequence[tuple[int, Origin]]) -> AnswerUpdate:
        """The answer as it stands, with tokens and origins that are not confirmed."""
        tokens = (*self._tokens, *(TokenOrigin(token, origin, False) for token, origin in unconfirmed))
        dropped = self._text.show(tokens, self._settled)
        self._settled = len(self._tokens)
        spans = self._text.spans()
        return AnswerUpdate(
            committed="".join(span.text for span in spans if span.committed),
            tentative="".join(span.text for span in spans if not span.committed),
            tokens=tokens,
            statistics=self.figures(),
            spans=spans,
            dropped=dropped,
            pieces=self._text.pieces(),
        )

    def disagreement(self, update: AnswerUpdate) -> Disagreement | None:
        """Whether the commitment that ``update`` shows took the place of text written offline."""
        rolled_back, self._rolled_back = self._rolled_back, None
        if rolled_back is None:
            return None
        written = zip(rolled_back.tokens, rolled_back.origins, strict=True)
        if sum(o is Origin.OFFLINE and t not in self._stop_tokens for t, o in written) < _WORTH_ASKING:
            return None
        self.disputed = rolled_back
        position = rolled_back.start - self.start
        before = self._text.before(position)
        text = update.committed + update.tentative
        shared = shared_word(before, update.dropped, text[len(before) :])
        offset = len(before) - len(shared)
        return Disagreement(position, offset, shared + update.dropped, text[offset:])

    def take_back(self, position: int) -> None:
        """Forget the confirmed tokens from absolute ``position`` on."""
        taken_back = self._tokens[position - self.start :]
        del self._tokens[position - self.start :]
        self._settled = min(self._settled, len(self._tokens))
        kept_before = sum(token.origin is Origin.KEPT for token in taken_back)
        self.statistics.tokens -= len(taken_back)
        self.statistics.kept -= kept_before
        self.statistics.taken_back += len(taken_back) - kept_before
        self._rolled_back, self.ended = None, None

    def finish(self, reason: FinishReason) -> AnswerFinished:
        """The whole answer."""
        self.ended = reason
        text = self.confirmed_text()
        spans, pieces = self._text.spans(complete=True), self._text.pieces(complete=True)
        return AnswerFinished(text, tuple(self._tokens), reason, self.figures(), spans, pieces)

    def confirmed_text(self) -> str:
        """The text up to here, nothing tentative."""
        self._text.show(self._tokens, self._settled)
        return "".join(span.text for span in self._text.spans(complete=True))

    def pause_clock(self) -> None:
        """The answer has ended."""
        self._ended_at = time.monotonic()

    def resume_clock(self) -> None:
        """The answer is being written again; the time between does not count."""
        self._asked_at += time.monotonic() - self._ended_at
