"""An index of n-grams, without training: a text goes on as it went on before (as in SSSD, arXiv 2411.05894)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import GREEDY, Budget, DraftToken, Float32
from moa_runtime.drafters.gumbel import NO_COUPLING, GumbelCoupling
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_runtime.tokens import common_length

#: The index's share of a candidate's probability, for matching suffixes of at least so many tokens. By expectation
#: maximisation on answers of the default target; they hardly depend on the depth of a draft.
WEIGHTS = {1: 0.13, 2: 0.34, 3: 0.46, 4: 0.55, 5: 0.63, 8: 0.77, 16: 0.91}
#: A datastore's share of what drafter and conversation say together, likewise, where its suffix is the longer one.
#: A drafter knows what its target often says, so a suffix says little until it is long.
DATASTORE_WEIGHTS = {4: 0.07, 6: 0.11, 8: 0.15, 10: 0.22, 12: 0.43, 16: 0.85}
_DATASTORE_WEIGHTS = sorted(DATASTORE_WEIGHTS.items(), reverse=True)
_LEAST_IN_DATASTORE = min(DATASTORE_WEIGHTS)
_DATASTORE_OCCURRENCES = 32
_NOTHING: tuple[float, Mapping[int, float]] = (0.0, {})
#: Probability from which a token is worth verifying that took no step: a longer draft costs a target little.
WORTH_COPYING = 0.1
_WORTH_COPYING_NATS = math.log(WORTH_COPYING)


def worth_copying(budget: Budget, logprob: float) -> bool:
    """Whether a token that takes no step is worth sending in a chain, by the log-probability of its path (nats)."""
    return budget.logprob + logprob >= _WORTH_COPYING_NATS and budget.sends(logprob)


class NgramMixture:
    """Mixes a drafter's candidates with an :class:`~moa_runtime.drafters.ngram.NgramIndex` of the conversation.

    With ``w`` the weight for the length of the matching suffix, a candidate's probability becomes ``(1 - w) * drafter
    + w * index``. A token need not be in the draft vocabulary to be copied. A datastore is mixed into that likewise,
    where its suffix is longer than the conversation's.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
        datastore: earlier texts; None, and the conversation is all there is.
        weights: the index's, by the least length of the suffixes they are for; see :data:`WEIGHTS`.
        reach: tokens behind the last one that the target confirmed that are mixed. What is written farther on, when
            the network is away, is the drafter's alone: a text that copies from itself ends in a loop.

    Raises:
        ValueError: a weight that is not above 0 and below 1, or none for suffixes of one token.
    """

    def __init__(
        self,
        stop_tokens: Collection[int] = (),
        *,
        datastore: Datastore | None = None,
        weights: Mapping[int, float] = WEIGHTS,
        reach: int = 16,
    ) -> None:
        if 1 not in weights or not all(0 < weight < 1 for weight in weights.values()):
            raise ValueError(f"expected weights above 0 and below 1, the first for a length of 1, got {weights}")
        self._index, self._datastore = NgramIndex(stop_tokens), datastore
        self._stop_tokens = frozenset(stop_tokens)
        self._weights, self._reach = sorted(weights.items(), reverse=True), reach
        self._confirmed = 0

    def confirm(self, text: Sequence[int]) -> None:
        """Take ``text``, which the target confirmed, as what is copied from."""
        self._index.update(text)
        self._confirmed = len(text)

    def mix(self, candidates: list[DraftToken], path: Sequence[int]) -> list[DraftToken]:
        """What may follow ``path``, the whole text up to there, best first; more than ``candidates`` where the index
        has others."""
        weight, followers = self._known(path) if self._reaches(path) else _NOTHING
        if not followers:
            return candidates
        mixed = {candidate.token: (1 - weight) * math.exp(candidate.logprob) for candidate in candidates}
        for token, probability in followers.items():
            mixed[token] = mixed.get(token, 0.0) + weight * probability
        ranked = sorted(mixed.items(), key=lambda item: -item[1])
        # exp() of a hopeless candidate may be 0, which has no logarithm.
        return [DraftToken(token, math.log(probability)) for token, probability in ranked if probability > 0]

    def copy(self, path: Sequence[int], coupling: GumbelCoupling = NO_COUPLING) -> DraftToken | None:
        """What the index alone expects after ``path``, within the reach; None where it knows nothing. It costs no step
        of the drafter, whose part in the probability is 0."""
        return self._copy(path, len(path), coupling) if self._reaches(path) else None

    def copies(
        self, path: Sequence[int], coupling: GumbelCoupling = NO_COUPLING, before: int = 0
    ) -> Iterator[DraftToken]:
        """The same, one token after the other until none is known, and beyond the reach: take what is worth verifying,
        there may be no end.

        Args:
            before: tokens of the text before ``path``, of which the last few are enough.
        """
        position = before + len(path)
        text = list(path[-LONGEST_SUFFIX:])
        while copy := self._copy(text, position, coupling):
            text.append(copy.token)
            position += 1
            yield copy

    def _copy(self, path: Sequence[int], position: int, coupling: GumbelCoupling) -> DraftToken | None:
        weight, shares = self._known(path)
        if not shares:
            return None
        followers = [DraftToken(token, math.log(weight * share)) for token, share in shares.items()]
        return coupling.best(followers, position)

    def _known(self, path: Sequence[int]) -> tuple[float, Mapping[int, float]]:
        """The tokens that followed the end of ``path`` before, and what that weighs; none where it is new."""
        match = self._index.match(path)
        weight, shares = _NOTHING if match is None else (_weight(self._weights, match.length), match.probabilities)
        shorter = 0 if match is None else match.length
        outer, others = self._known_elsewhere(path, max(shorter + 1, _LEAST_IN_DATASTORE))
        if not others:
            return weight, shares
        both = {token: outer * share for token, share in others.items()}
        for token, share in shares.items():
            both[token] = both.get(token, 0.0) + (1 - outer) * weight * share
        total = outer + (1 - outer) * weight
        return total, {token: part / total for token, part in both.items()}

    def _known_elsewhere(self, path: Sequence[int], least: int) -> tuple[float, Mapping[int, float]]:
        """The same of the datastore, by suffixes of at least ``least`` tokens."""
        if self._datastore is None or not (length := self._datastore.longest(path[-LONGEST_SUFFIX:], least)):
            return _NOTHING
        found = self._datastore.followers(path[-length:], most=_DATASTORE_OCCURRENCES)
        followers = {token: share for token, share in found.items() if token not in self._stop_tokens}
        return _weight(_DATASTORE_WEIGHTS, length), followers

    def _reaches(self, path: Sequence[int]) -> bool:
        return len(path) < self._confirmed + self._reach


def _weight(weights: Sequence[tuple[int, float]], length: int) -> float:
    """Of a suffix, by weights for at least so many tokens, the most first."""
    return next(weight for least, weight in weights if length >= least)


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


class NgramDrafter:
    """A drafter without a model: all that it knows takes no step. Implements
    :class:`moa_runtime.drafters.base.Drafter`.

    It knows the conversation and what it wrote itself, nothing else, so during an outage it goes stale. Memory rows are
    of no use to it.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
    """

    rows = 0
    needs_rows = False
    stopping_rule = None

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._mixture = NgramMixture(stop_tokens)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Memory rows are not used."""

    def truncate_rows(self, length: int) -> None:
        """Memory rows are not used."""

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """A chain of what followed before, which ends where the last token never occurred before. It is as long as the
        levels, where that pays, and longer, also without levels, while all of it is likely enough: see
        :func:`moa_runtime.drafters.ngram.worth_copying`. See :meth:`moa_runtime.drafters.base.Drafter.propose`."""
        text, logprobs, logprob, coupling = list(prefix), list[float](), 0.0, GumbelCoupling(sampling)
        while len(logprobs) < min(budget.nodes, budget.depth):
            self._mixture.confirm(text)
            copy = self._mixture.copy(text, coupling)
            if copy is None:
                break
            logprob += copy.logprob
            levelled = len(logprobs) < budget.levels and (not logprobs or budget.sends(logprob))
            if not levelled and not worth_copying(budget, logprob):
                break
            text.append(copy.token)
            logprobs.append(copy.logprob)
        return DraftTree.chain(text[len(prefix) :], logprobs)
