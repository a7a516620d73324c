"""An index of n-grams, without training: a text goes on as it went on before (as in SSSD, arXiv 2411.05894)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from moa_runtime.tokens import common_length

#: A suffix that occurred before counts as at most so many tokens long.
LONGEST_SUFFIX = 16
_TABLED = 5  # runs of up to so many tokens are looked up, what precedes them is compared
_OCCURRENCES = 8
_DECAY = 0.7


@dataclass(frozen=True)
class Match:
    """What followed the longest suffix that occurred before.

    Attributes:
        length: of the suffix, 1 to :data:`LONGEST_SUFFIX` tokens.
        probabilities: of the tokens that followed, the latest first, adding up to 1. Of the last eight occurrences
            each counts 0.7 times the one after it.
    """

    length: int
    probabilities: Mapping[int, float]


class NgramIndex:
    """What followed every run of tokens of one text.

    Example: after ``index.update([1, 2, 3, 1, 2, 4])``, ``index.match([9, 1, 2])`` has length 2 and the probabilities
    ``{4: 0.59, 3: 0.41}``.

    Args:
        stop_tokens: ids that end a turn. They never count as what followed: that a turn of the user ended says nothing
            about the answer.
    """

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._stop_tokens = frozenset(stop_tokens)
        self._text: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # of what followed, oldest first

    def update(self, text: Sequence[int]) -> None:
        """Hold ``text`` instead of what was held; costs what the end differs by."""
        keep = common_length(self._text, text)
        while len(self._text) > keep:
            token = self._text.pop()
            for run in self._runs(token):
                self._places[run].pop()
        for token in text[keep:]:
            for run in self._runs(token):
                self._places[run].append(len(self._text))
            self._text.append(token)

    def match(self, tokens: Sequence[int]) -> Match | None:
        """The longest suffix of ``tokens`` that occurs in the text with a token after it, None without one."""
        for length in range(min(_TABLED, len(tokens)), 0, -1):
            places = self._places.get(tuple(tokens[-length:]))
            if places:
                lengths = {place: self._length(tokens, place, length) for place in places[-_OCCURRENCES:]}
                longest = max(lengths.values())
                followers = [self._text[place] for place, length in lengths.items() if length == longest]
                return Match(longest, _probabilities(followers))
        return None

    def continuations(self, run: Sequence[int], *, most: int, length: int) -> list[list[int]]:
        """What followed a run of at most five tokens, up to ``length`` tokens each and to the end of a turn: that of
        the latest occurrences, ``most`` of them."""
        found = (self._text[place : place + length] for place in self._places.get(tuple(run), [])[-most:])
        return [list(takewhile(lambda token: token not in self._stop_tokens, one)) for one in found]

    def _length(self, tokens: Sequence[int], place: int, length: int) -> int:
        """How many tokens before ``place`` are the last of ``tokens``, at most :data:`LONGEST_SUFFIX`; at least
        ``length`` are, and no more if fewer than were looked up."""
        most = min(LONGEST_SUFFIX, len(tokens), place) if length == _TABLED else length
        while length < most and self._text[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _runs(self, token: int) -> list[tuple[int, ...]]:
        """The runs at the end of the text that ``token`` counts as following."""
        if token in self._stop_tokens:
            return []
        return [tuple(self._text[-length:]) for length in range(1, min(_TABLED, len(self._text)) + 1)]


def _probabilities(followers: Sequence[int]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for age, token in enumerate(reversed(followers)):
        weights[token] = weights.get(token, 0.0) + _DECAY**age
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}
