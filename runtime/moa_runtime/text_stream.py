"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.tokenizer import ChatTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Longer runs of replacement characters are the model's own noise, not a character still to come.
_NOISE = 8


class TextStream:
    """Turns a growing list of tokens into text, piece by piece, without ever emitting half a character.

    Example: a character whose UTF-8 bytes are spread over two tokens comes out with the second: the
    tokens ``Caf``, ``0xC3``, ``0xA9`` give ``"Caf"``, ``""``, ``"é"``.

    Args:
        behind: tokens of a text that these go on with; by themselves they begin one, whose leading space some
            decoders leave out.
    """

    def __init__(self, tokenizer: ChatTokenizer, behind: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(behind)
        self._lead = len(behind)
        # The text up to token `_anchor` is out. Decoding starts at `_window` before it, because decoders
        # treat the first token's leading space specially, and not at 0, which would cost quadratic time.
        self._window = 0
        self._anchor = len(behind)
        self._emitted = 0  # characters behind the anchor that are out already
        self._states: list[tuple[int, int, int]] = []  # these three before each token

    def push(self, token: int) -> str:
        """Add one token; returns the text that is certain now, perhaps none."""
        self._states.append((self._window, self._anchor, self._emitted))
        self._tokens.append(token)
        pending = self._pending()
        whole = pending.rstrip(_REPLACEMENT)
        if 0 < len(pending) - len(whole) <= _NOISE:
            piece = whole[self._emitted :]
            self._emitted += len(piece)
            return piece
        return self._release(pending)

    def finish(self) -> str:
        """The text held back; a character that never became whole is a replacement character."""
        return self._pending()[self._emitted :]

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count`` tokens, as if the others had never come."""
        if count < len(self._states):
            self._window, self._anchor, self._emitted = self._states[count]
            del self._tokens[self._lead + count :], self._states[count:]

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._tokens[self._window : self._anchor])
        return self._tokenizer.decode(self._tokens[self._window :])[len(known) :]

    def _release(self, pending: str) -> str:
        piece = pending[self._emitted :]
        self._window, self._anchor, self._emitted = self._anchor, len(self._tokens), 0
        return piece
