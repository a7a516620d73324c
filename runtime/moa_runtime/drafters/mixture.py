"""A drafter's candidates mixed with what followed the same words before: a cache language model (Kuhn, De Mori 1990).

A small drafter knows the language and hardly the conversation; an n-gram index knows nothing but the conversation.
What a target copies from its prompt, or says again, the index gets right where the drafter does not. A datastore knows
what was said in earlier conversations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from moa_runtime.datastore.reader import Datastore
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.gumbel_coupling import NO_LUCK, Luck
from moa_runtime.drafters.ngram import LONGEST_SUFFIX, NgramIndex

#: The index's share of a candidate's probability, for matching suffixes of at least so many tokens. By expectation
#: maximisation on answers of the default target; they hardly depend on the depth of a draft.
WEIGHTS = {1: 0.13, 2: 0.34, 3: 0.46, 4: 0.55, 5: 0.63, 8: 0.77, 16: 0.91}
#: A datastore's share of what drafter and conversation say together, likewise, where its suffix is the longer one.
#: A drafter knows what its target often says, so a suffix says little until it is long.
DATASTORE_WEIGHTS = {4: 0.07, 6: 0.11, 8: 0.15, 10: 0.22, 12: 0.43, 16: 0.85}
_DATASTORE_WEIGHTS = sorted(DATASTORE_WEIGHTS.items(), reverse=True)
_LEAST_IN_DATASTORE = min(DATASTORE_WEIGHTS)
_OCCURRENCES = 32
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

    def copy(self, path: Sequence[int], luck: Luck = NO_LUCK) -> DraftToken | None:
        """What the index alone expects after ``path``, within the reach; None where it knows nothing. It costs no step
        of the drafter, whose part in the probability is 0."""
        return self._copy(path, len(path), luck) if self._reaches(path) else None

    def copies(self, path: Sequence[int], luck: Luck = NO_LUCK, before: int = 0) -> Iterator[DraftToken]:
        """The same, one token after the other until none is known, and beyond the reach: take what is worth verifying,
        there may be no end.

        Args:
            before: tokens of the text before ``path``, of which the last few are enough.
        """
        position = before + len(path)
        text = list(path[-LONGEST_SUFFIX:])
        while copy := self._copy(text, position, luck):
            text.append(copy.token)
            position += 1
            yield copy

    def _copy(self, path: Sequence[int], position: int, luck: Luck) -> DraftToken | None:
        weight, shares = self._known(path)
        if not shares:
            return None
        followers = [DraftToken(token, math.log(weight * share)) for token, share in shares.items()]
        return luck.best(followers, position)

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
        found = self._datastore.followers(path[-length:], most=_OCCURRENCES)
        followers = {token: share for token, share in found.items() if token not in self._stop_tokens}
        return _weight(_DATASTORE_WEIGHTS, length), followers

    def _reaches(self, path: Sequence[int]) -> bool:
        return len(path) < self._confirmed + self._reach


def _weight(weights: Sequence[tuple[int, float]], length: int) -> float:
    """Of a suffix, by weights for at least so many tokens, the most first."""
    return next(weight for least, weight in weights if length >= least)
