"""A drafter without a model: it continues a text the way the text went on before."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moa_runtime.drafters.base import DraftToken, Float32

LONGEST_SUFFIX = 4


class NgramDrafter:
    """Copies the token that followed the last tokens when they occurred before.

    The longest suffix of up to :data:`LONGEST_SUFFIX` tokens that occurred counts, and of several occurrences
    the most recent. It knows the conversation and what it wrote itself, nothing else, so during an outage it
    goes stale. Implements :class:`moa_runtime.drafters.base.Drafter`; memory rows are of no use to it.

    Example: after ``a b c a b d a b`` comes ``d``, since the suffix ``a b`` was last followed by it.

    Args:
        stop_tokens: ids that end a turn. They are never copied: the user's turn ended with one, which says
            nothing about the answer.
    """

    rows = 0

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._stop_tokens = frozenset(stop_tokens)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Memory rows are not used."""

    def truncate_rows(self, length: int) -> None:
        """Memory rows are not used."""

    def draft(self, prefix: Sequence[int], count: int) -> list[DraftToken]:
        """Continue ``prefix`` by ``count`` tokens, fewer where the last token never occurred before.

        It considers no alternatives: each token's log-probability is 0.
        """
        tokens = list(prefix)
        while len(tokens) < len(prefix) + count and (following := self._following(tokens)) is not None:
            tokens.append(following)
        return [DraftToken(token, 0.0) for token in tokens[len(prefix) :]]

    def _following(self, tokens: list[int]) -> int | None:
        """The token that followed the longest suffix of ``tokens`` that occurred before, None without one."""
        for length in range(min(LONGEST_SUFFIX, len(tokens) - 1), 0, -1):
            suffix = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                following = tokens[start + length]
                if tokens[start : start + length] == suffix and following not in self._stop_tokens:
                    return following
        return None
