"""N-grams of the conversation, without training: a text continues as it did before (as in SSSD, arXiv 2411.05894)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import GREEDY, Budget, DraftToken, RowlessDrafter
from moa_runtime.drafters.grammar_mask import GrammarMask
from moa_runtime.drafters.gumbel import NO_COUPLING, GumbelCoupling
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_runtime.tokens import common_length

#: The index's share of a candidate's probability, by the least length of the matching suffix in tokens. By expectation
#: maximisation on answers of the default target; they hardly depend on the depth of a draft.
WEIGHTS = {1: 0.13, 2: 0.34, 3: 0.46, 4: 0.55, 5: 0.63, 8: 0.77, 16: 0.91}
#: The same for a datastore beside drafter and conversation, if its suffix is the longest one. A drafter knows what its
#: target often says, so a suffix says little until it is long.
DATASTORE_WEIGHTS = {4: 0.07, 6: 0.11, 8: 0.15, 10: 0.22, 12: 0.43, 16: 0.85}
_DATASTORE_OCCURRENCES = 32
_NOTHING: tuple[float, Mapping[int, float]] = (0.0, {})
#: Probability from which a token is worth verifying that took no step: a longer draft costs a target little.
WORTH_COPYING = 0.1
_WORTH_COPYING_NATS = math.log(WORTH_COPYING)
#: Tokens after the last one that the target confirmed that may be copied. Text that is written farther on, during an
#: outage, is the drafter's alone: a text that copies from itself ends in a loop.
REACH = 16


def worth_copying(budget: Budget, logprob: float) -> bool:
    """Return whether a token that takes no step is worth sending in a chain, by its path's log-probability (nats)."""
    return budget.logprob + logprob >= _WORTH_COPYING_NATS and budget.sends(logprob)


class NgramMixture:
    """Mixes a drafter's candidates with an :class:`~moa_runtime.drafters.ngram.NgramIndex` of the conversation.

    With ``w`` the weight for the length of the matching suffix, a candidate's probability becomes ``(1 - w) * drafter
    + w * index``. A token need not be in the draft vocabulary to be copied. A datastore is mixed into that likewise,
    if its suffix is longer than the conversation's.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
        datastore: earlier texts, if any.
    """

    def __init__(self, stop_tokens: Collection[int] = (), *, datastore: Datastore | None = None) -> None:
        self._index, self._datastore = NgramIndex(stop_tokens), datastore
        self._stop_tokens = frozenset(stop_tokens)
        self._confirmed = 0

    def confirm(self, text: Sequence[int]) -> None:
        """Copy from ``text``, which the target confirmed, from now on."""
        self._index.update(text)
        self._confirmed = len(text)

    def mix(self, candidates: list[DraftToken], path: Sequence[int]) -> list[DraftToken]:
        """Return the tokens that may follow ``path``, the whole text so far, best first: ``candidates`` and copies."""
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
        """Return the copy that may follow ``path`` within :data:`REACH`, if any. It takes no step of the drafter, whose
        part in the probability is 0."""
        return self._copy(path, len(path), coupling) if self._reaches(path) else None

    def copies(
        self, path: Sequence[int], coupling: GumbelCoupling = NO_COUPLING, before: int = 0
    ) -> Iterator[DraftToken]:
        """Yield copies one after the other, also beyond :data:`REACH`, until none is known, which may be never.

        Args:
            path: the text, or its last few tokens.
            before: number of tokens of the text before ``path``.
        """
        position = before + len(path)
        text = list(path[-LONGEST_SUFFIX:])
        while copy := self._copy(text, position, coupling):
            text.append(copy.token)
            position += 1
            yield copy

    def followers(self, path: Sequence[int], position: int, coupling: GumbelCoupling) -> list[DraftToken]:
        """Return all copies that may follow ``path``, the text or its last few tokens, at ``position``, best first."""
        weight, shares = self._known(path)
        if not shares:
            return []
        return coupling.ranked_few(
            [DraftToken(token, math.log(weight * share)) for token, share in shares.items()], position
        )

    def _copy(self, path: Sequence[int], position: int, coupling: GumbelCoupling) -> DraftToken | None:
        weight, shares = self._known(path)
        if not shares:
            return None
        followers = [DraftToken(token, math.log(weight * share)) for token, share in shares.items()]
        return coupling.best(followers, position)

    def _known(self, path: Sequence[int]) -> tuple[float, Mapping[int, float]]:
        """Return the tokens that followed the end of ``path`` before, and their weight."""
        match = self._index.match(path)
        weight, shares = _NOTHING if match is None else (_weight(WEIGHTS, match.length), match.probabilities)
        outer, others = self._known_elsewhere(path, 1 if match is None else match.length + 1)
        if not others:
            return weight, shares
        both = {token: outer * share for token, share in others.items()}
        for token, share in shares.items():
            both[token] = both.get(token, 0.0) + (1 - outer) * weight * share
        total = outer + (1 - outer) * weight
        return total, {token: part / total for token, part in both.items()}

    def _known_elsewhere(self, path: Sequence[int], least: int) -> tuple[float, Mapping[int, float]]:
        """Return the same of the datastore, by suffixes of at least ``least`` tokens."""
        least = max(least, min(DATASTORE_WEIGHTS))
        if self._datastore is None or not (length := self._datastore.longest(path[-LONGEST_SUFFIX:], least)):
            return _NOTHING
        found = self._datastore.followers(path[-length:], most=_DATASTORE_OCCURRENCES)
        followers = {token: share for token, share in found.items() if token not in self._stop_tokens}
        return _weight(DATASTORE_WEIGHTS, length), followers

    def _reaches(self, path: Sequence[int]) -> bool:
        return len(path) < self._confirmed + REACH


def _weight(weights: Mapping[int, float], length: int) -> float:
    """Return the weight of a suffix of ``length`` tokens; ``weights`` are by their least lengths."""
    return weights[max(least for least in weights if least <= length)]


#: Tokens of the longest suffix that is compared.
LONGEST_SUFFIX = 16
_TABLED = 5  # runs of up to this many tokens are looked up, the tokens before them are compared
_OCCURRENCES = 8
_DECAY = 0.7


@dataclass(frozen=True)
class Match:
    """The tokens that followed the longest suffix that occurred before.

    Attributes:
        length: of the suffix, 1 to :data:`LONGEST_SUFFIX` tokens.
        probabilities: of the tokens that followed, the latest first; their sum is 1. Each of the last eight occurrences
            counts 0.7 times the next one.
    """

    length: int
    probabilities: Mapping[int, float]


class NgramIndex:
    """The tokens that followed each run of tokens of one text.

    Example: after ``index.update([1, 2, 3, 1, 2, 4])``, ``index.match([9, 1, 2])`` has length 2 and the probabilities
    ``{4: 0.59, 3: 0.41}``.

    Args:
        stop_tokens: ids that end a turn. They do not count as followers: the end of a user's turn says nothing about
            the answer.
    """

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._stop_tokens = frozenset(stop_tokens)
        self._text: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # of what followed, oldest first

    def update(self, text: Sequence[int]) -> None:
        """Replace the indexed text; takes time for the tokens after the common prefix alone."""
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
        """Return the longest suffix of ``tokens`` that occurs in the text with a token after it, if any."""
        for length in range(min(_TABLED, len(tokens)), 0, -1):
            places = self._places.get(tuple(tokens[-length:]))
            if places:
                lengths = {place: self._length(tokens, place, length) for place in places[-_OCCURRENCES:]}
                longest = max(lengths.values())
                followers = [self._text[place] for place, length in lengths.items() if length == longest]
                return Match(longest, _probabilities(followers))
        return None

    def continuations(self, run: Sequence[int], *, most: int, length: int) -> list[list[int]]:
        """Return the tokens after the ``most`` latest occurrences of a run of at most five tokens, each time up to
        ``length`` tokens or the end of a turn."""
        found = (self._text[place : place + length] for place in self._places.get(tuple(run), [])[-most:])
        return [list(takewhile(lambda token: token not in self._stop_tokens, one)) for one in found]

    def _length(self, tokens: Sequence[int], place: int, length: int) -> int:
        """Return how many tokens before ``place`` are the last of ``tokens``, at most :data:`LONGEST_SUFFIX`; the last
        ``length`` are known to be."""
        most = min(LONGEST_SUFFIX, len(tokens), place) if length == _TABLED else length
        while length < most and self._text[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def _runs(self, token: int) -> list[tuple[int, ...]]:
        """Return the runs at the end of the text that ``token`` counts as following."""
        if token in self._stop_tokens:
            return []
        return [tuple(self._text[-length:]) for length in range(1, min(_TABLED, len(self._text)) + 1)]


def _probabilities(followers: Sequence[int]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for age, token in enumerate(reversed(followers)):
        weights[token] = weights.get(token, 0.0) + _DECAY**age
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


class NgramDrafter(RowlessDrafter):
    """A drafter without a model that copies from the conversation and its own text, so its drafts take no step.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
    """

    stopping_rule = None  # `moa-bench offline` measures what it would write

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._mixture = NgramMixture(stop_tokens)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Draft a chain of copies, which ends after a token that never occurred before; forced tokens come first.

        It is as long as the levels if that pays, and longer, also without levels, while it is :func:`worth_copying`.
        See :meth:`moa_runtime.drafters.base.Drafter.propose`.
        """
        room, mask, coupling = min(budget.nodes, budget.depth), GrammarMask(sampling, prefix), GumbelCoupling(sampling)
        stem, logprob = mask.forced()[:room], 0.0
        text, logprobs = [*prefix, *stem], [0.0] * len(stem)
        while len(logprobs) < room:
            self._mixture.confirm(text)
            copy = self._mixture.copy(text, coupling)
            if copy is None or not mask.left([copy], text[len(prefix) :]):
                break
            logprob += copy.logprob
            levelled = len(logprobs) < budget.levels and (not logprobs or budget.sends(logprob))
            if not levelled and not worth_copying(budget, logprob):
                break
            text.append(copy.token)
            logprobs.append(copy.logprob)
        return DraftTree.chain(text[len(prefix) :], logprobs)
