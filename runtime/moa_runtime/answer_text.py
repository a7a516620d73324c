"""The text of an answer whose tokens are confirmed, replaced and taken back while it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moa_runtime.events import Origin, TextSpan, TokenOrigin
from moa_runtime.text_stream import TextStream
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.tokens import common_length


class AnswerText:
    """Decodes only what changed since the call before.

    Example: after ``show`` of the tokens of "Paris is nice", one of "Paris is big" decodes one token and returns
    the dropped " nice".

    Args:
        behind: tokens of a text that the answer goes on with; none where it is a text of its own.
    """

    def __init__(self, tokenizer: ChatTokenizer, behind: Sequence[int] = ()) -> None:
        self._stream = TextStream(tokenizer, behind)
        self._tokens: list[TokenOrigin] = []
        self._pieces: list[str] = []
        self._settled = 0  # tokens that are the same as when the runs were made
        self._runs: list[tuple[int, TextSpan]] = []  # each with the index behind its last token

    def show(self, tokens: Sequence[TokenOrigin], settled: int = 0) -> str:
        """Take the answer's tokens as they stand; returns the text of those that are no longer there.

        Args:
            settled: how many of them, at the beginning, are known to be the same as at the call before.
        """
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
        """The text, one span for each run of tokens of one origin and confirmation.

        Args:
            complete: whether no more tokens follow: an unfinished character at the end then becomes a replacement
                character, and is left out otherwise.
        """
        # A run that ends where the settled tokens do may go on behind them.
        while self._runs and (complete or self._runs[-1][0] >= self._settled):
            self._runs.pop()
        end = self._runs[-1][0] if self._runs else 0
        tokens, pieces = self._tokens[end:], self._pieces[end:]
        if complete and pieces:
            pieces[-1] += self._stream.finish()
        for (origin, committed), run in groupby(zip(tokens, pieces, strict=True), key=_kind):
            texts = [piece for _, piece in run]
            end += len(texts)
            self._runs.append((end, TextSpan("".join(texts), origin, committed)))
        self._settled = end
        return tuple(span for _, span in self._runs if span.text)

    def pieces(self, *, complete: bool = False) -> tuple[str, ...]:
        """The text, one piece for each token, perhaps an empty one. ``complete``: see :meth:`spans`."""
        pieces = list(self._pieces)
        if complete and pieces:
            pieces[-1] += self._stream.finish()
        return tuple(pieces)

    def before(self, count: int) -> str:
        """Text of the first ``count`` tokens."""
        return "".join(self._pieces[:count])


def shared_word(before: str, *versions: str) -> str:
    """The word at the end of a text that one of its continuations goes on with.

    >>> shared_word("in every col", "ours", "umn")
    'col'
    >>> shared_word("in every column", " of it", ", too")
    'column'
    >>> shared_word("in every column", " of it", " and row")
    ''
    """
    goes_on = any(version[:1].strip() for version in versions)
    words = before.split()
    return words[-1] if goes_on and words and not before[-1].isspace() else ""


def _kind(shown: tuple[TokenOrigin, str]) -> tuple[Origin, bool]:
    token, _ = shown
    return token.origin, token.committed
