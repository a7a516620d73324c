"""One answer as the application sees it: tokens with their origins, text and figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from moa_runtime.conversation import Question
from moa_runtime.drafting.events import Drafted, LinkLost, LoopEvent, Pushed, RoundEnded
from moa_runtime.events import (
    AnswerFinished,
    AnswerUpdate,
    Disagreement,
    FinishReason,
    Origin,
    Statistics,
    TextSpan,
    TokenOrigin,
    WholeAnswer,
)
from moa_runtime.session.events import Cause, Committed, Decided, RolledBack
from moa_runtime.tokenizer import ChatTokenizer, TextStream
from moa_runtime.tokens import common_length

#: Offline tokens below which a disagreement is not worth a question: a late verdict often overtakes a few.
_WORTH_ASKING = 8
#: Tokens of a draft in the figures, whatever a server says.
_MOST_DRAFTED = 1024


class AnswerRecord:
    """Collect one answer from the events of the drafting loop, from the moment its question is sent.

    Args:
        bytes_moved: returns the payload bytes sent and received so far, with those of earlier answers.
        shown: see :meth:`moa_runtime.tokenizer.ChatTokenizer.decode`.

    Attributes:
        start: absolute position of the answer's first token.
        statistics: its figures.
        disputed: text rolled back by the last :class:`~moa_runtime.events.Disagreement`.
        ended: how it ended; None while it is being written.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        question: Question,
        bytes_moved: Callable[[], tuple[int, int]],
        shown: Collection[int] = frozenset(),
    ) -> None:
        self.question = question
        self.start = question.length
        self.statistics = Statistics()
        self.disputed: RolledBack | None = None
        self.ended: FinishReason | None = None
        self._stop_tokens = tokenizer.stop_tokens
        self._tokens: list[TokenOrigin] = []
        self._settled = 0  # of these, the ones in the last update
        self._text = AnswerText(tokenizer, question.behind, shown)
        self._rolled_back: RolledBack | None = None
        self._cause: Cause | None = None  # of the next committed tokens
        self._bytes_moved, self._bytes_before = bytes_moved, bytes_moved()
        self._asked_at = time.monotonic()
        self._ended_at = self._asked_at

    def resume(self, tokens: Sequence[TokenOrigin], statistics: Statistics) -> None:
        """Continue an answer with these committed tokens. The time before does not count."""
        self._tokens = list(tokens)
        self.statistics = statistics
        up, down = self._bytes_before
        self._bytes_before = up - statistics.bytes_up, down - statistics.bytes_down
        self._asked_at -= statistics.seconds

    @property
    def tokens(self) -> tuple[TokenOrigin, ...]:
        """The committed tokens."""
        return tuple(self._tokens)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Origins of the committed tokens."""
        return tuple(token.origin for token in self._tokens)

    def figures(self) -> Statistics:
        """Return the answer's present figures."""
        up, down = self._bytes_moved()
        self.statistics.bytes_up, self.statistics.bytes_down = up - self._bytes_before[0], down - self._bytes_before[1]
        self.statistics.seconds = time.monotonic() - self._asked_at
        return self.statistics.snapshot()

    def hear(self, event: LoopEvent) -> None:
        """Take an event of the drafting loop."""
        statistics = self.statistics
        if isinstance(event, Decided):
            self._cause = event.cause
        elif isinstance(event, Committed):
            self._commit(event)
        elif isinstance(event, RolledBack):  # the target's own tokens are committed next
            self._rolled_back = event
            statistics.rolled_back += len(event.tokens)
        elif isinstance(event, Drafted):
            statistics.draft_seconds += event.seconds
            statistics.drafted += event.unsolicited
        elif isinstance(event, RoundEnded | Pushed):
            statistics.rounds += 1
            statistics.round_trips.append(event.waited_s)
            statistics.wait_seconds += event.waited_s
            statistics.streamed = isinstance(event, Pushed)
            if event.drafted:
                drafted = min(event.drafted, _MOST_DRAFTED)
                statistics.verified.append((drafted, min(event.accepted, drafted)))
            if isinstance(event, Pushed) and not event.draft_stamp:
                statistics.server_drafted += event.drafted
                statistics.server_accepted += event.accepted
            else:
                statistics.drafted += event.sent if isinstance(event, RoundEnded) else 0  # else counted when sent
                statistics.accepted += event.accepted
        elif isinstance(event, LinkLost):
            statistics.reconnects += 1

    def note_dtype(self, dtype: str) -> None:
        """Note the type of the target's numbers that a verdict comes from; empty for an unknown one."""
        if dtype and dtype != self.statistics.dtype.rpartition(", ")[2]:
            self.statistics.dtype += f", {dtype}" if self.statistics.dtype else dtype

    def _commit(self, event: Committed) -> None:
        statistics = self.statistics
        if event.tokens and statistics.first_token_seconds is None:
            statistics.first_token_seconds = time.monotonic() - self._asked_at
        kept = sum(origin is Origin.KEPT for origin in event.origins)
        statistics.tokens += len(event.tokens)
        statistics.kept += kept
        statistics.fetched += len(event.tokens) - kept if self._cause is Cause.FETCHED else 0
        statistics.pushed += len(event.tokens) - kept if self._cause is Cause.PUSHED else 0
        statistics.offline += kept + sum(origin is Origin.OFFLINE for origin in event.origins)
        logprobs = event.logprobs or (None,) * len(event.tokens)
        each = zip(event.tokens, event.origins, logprobs, strict=True)
        self._tokens += [TokenOrigin(token, origin, True, known) for token, origin, known in each]

    def update(self, unconfirmed: Sequence[tuple[int, Origin]]) -> AnswerUpdate:
        """Return the present answer as a first update, with unconfirmed tokens and their origins."""
        tokens = (*self._tokens, *(TokenOrigin(token, origin, False) for token, origin in unconfirmed))
        dropped = self._text.show(tokens, self._settled)
        self._settled = len(self._tokens)
        whole = WholeAnswer(tokens, self._text.spans(), self._text.pieces(), self.figures())
        return AnswerUpdate.of(whole, dropped)

    def disagreement(self, update: AnswerUpdate) -> Disagreement | None:
        """Return the disagreement if the tokens committed in ``update`` replaced text that was written offline."""
        rolled_back, self._rolled_back = self._rolled_back, None
        if rolled_back is None:
            return None
        written = zip(rolled_back.tokens, rolled_back.origins, strict=True)
        if sum(o is Origin.OFFLINE and t not in self._stop_tokens for t, o in written) < _WORTH_ASKING:
            return None
        self.disputed = rolled_back
        position = rolled_back.start - self.start
        before = "".join(self._text.pieces()[:position])
        text = update.committed + update.tentative
        shared = shared_word(before, update.dropped, text[len(before) :])
        offset = len(before) - len(shared)
        return Disagreement(position, offset, shared + update.dropped, text[offset:])

    def take_back(self, position: int) -> None:
        """Drop the committed tokens from absolute ``position`` on."""
        taken_back = self._tokens[position - self.start :]
        del self._tokens[position - self.start :]
        self._settled = min(self._settled, len(self._tokens))
        kept_before = sum(token.origin is Origin.KEPT for token in taken_back)
        self.statistics.tokens -= len(taken_back)
        self.statistics.kept -= kept_before
        self.statistics.taken_back += len(taken_back) - kept_before
        self._rolled_back, self.ended = None, None

    def finish(self, reason: FinishReason) -> AnswerFinished:
        """Return the whole answer."""
        self.ended = reason
        text = self.confirmed_text()
        spans, pieces = self._text.spans(complete=self._complete), self._text.pieces(complete=self._complete)
        return AnswerFinished(text, tuple(self._tokens), reason, self.figures(), spans, pieces)

    def confirmed_text(self) -> str:
        """Return the committed text, without half a character at its end if it was cut."""
        self._text.show(self._tokens, self._settled)
        return "".join(span.text for span in self._text.spans(complete=self._complete))

    @property
    def _complete(self) -> bool:
        return self.ended is FinishReason.STOP

    def pause_clock(self) -> None:
        """Note that the answer has ended."""
        self._ended_at = time.monotonic()

    def resume_clock(self) -> None:
        """Note that the answer is being written again; the time between does not count."""
        self._asked_at += time.monotonic() - self._ended_at


class AnswerText:
    """Decode the text of an answer whose tokens change, only as far as they changed.

    Example: after ``show`` of the tokens of "Paris is nice", ``show`` of "Paris is big" decodes one token and returns
    the dropped " nice".

    Args:
        behind: last tokens of a text that the answer continues; none for an answer of its own.
        shown: see :meth:`moa_runtime.tokenizer.ChatTokenizer.decode`.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, behind: Sequence[int] = (), shown: Collection[int] = frozenset()
    ) -> None:
        self._stream = TextStream(tokenizer, behind, shown)
        self._tokens: list[TokenOrigin] = []
        self._pieces: list[str] = []
        self._settled = 0  # tokens that have not changed since the runs were made
        self._runs: list[tuple[int, TextSpan]] = []  # each with the index after its last token

    def show(self, tokens: Sequence[TokenOrigin], settled: int = 0) -> str:
        """Take the answer's tokens, the first ``settled`` as in the last call; return the text of those dropped."""
        before, now = self._tokens[settled:], tokens[settled:]
        common = settled + common_length([token.token for token in before], [token.token for token in now])
        dropped = "".join(self._pieces[common:])
        self._stream.truncate(common)
        del self._pieces[common:]
        self._pieces += [self._stream.push(token.token) for token in tokens[common:]]
        self._tokens[settled:] = now
        self._settled = min(self._settled, settled)
        return dropped

    def spans(self, *, complete: bool = False) -> tuple[TextSpan, ...]:
        """Return the text, one span for each run of tokens of one origin and confirmation. If it is ``complete``, an
        unfinished character at its end becomes a replacement character; otherwise it is left out."""
        # A run that ends with the settled tokens may continue after them.
        while self._runs and (complete or self._runs[-1][0] >= self._settled):
            self._runs.pop()
        end = self._runs[-1][0] if self._runs else 0
        tokens, pieces = self._tokens[end:], self._pieces[end:]
        if complete and pieces:
            pieces[-1] += self._stream.finish()
        shown = zip(tokens, pieces, strict=True)
        for (origin, committed), run in groupby(shown, key=lambda each: (each[0].origin, each[0].committed)):
            texts = [piece for _, piece in run]
            end += len(texts)
            self._runs.append((end, TextSpan("".join(texts), origin, committed)))
        self._settled = end
        return tuple(span for _, span in self._runs if span.text)

    def pieces(self, *, complete: bool = False) -> tuple[str, ...]:
        """Return the text, one piece for each token, perhaps an empty one. ``complete``: see :meth:`spans`."""
        pieces = list(self._pieces)
        if complete and pieces:
            pieces[-1] += self._stream.finish()
        return tuple(pieces)


def shared_word(before: str, *versions: str) -> str:
    """Return the unfinished word at the end of a text, if one of its continuations completes it.

    >>> shared_word("in every col", "ours", "umn")
    'col'
    >>> shared_word("in every column", " of it", ", too")
    'column'
    >>> shared_word("in every column", " of it", " and row")
    ''
    """
    continued = any(version[:1].strip() for version in versions)
    words = before.split()
    return words[-1] if continued and words and not before[-1].isspace() else ""
