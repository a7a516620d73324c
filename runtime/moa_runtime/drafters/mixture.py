"""A drafter's candidates mixed with what followed the same words before: a cache language model (Kuhn, De Mori 1990).

A small drafter knows the language and hardly the conversation; an n-gram index knows nothing but the conversation.
What a target copies from its prompt, or says again, the index gets right where the drafter does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from moa_runtime.drafters.base import DraftToken
from moa_runtime.drafters.ngram import LONGEST_SUFFIX, NgramIndex

#: The index's share of a candidate's probability, by the length of the suffix that matched (1 to LONGEST_SUFFIX). By
#: expectation maximisation on answers of the default target (docs/log.md); they hardly depend on the depth of a draft.
WEIGHTS = (0.09, 0.33, 0.47, 0.5, 0.77)


class NgramMixture:
    """Mixes a drafter's candidates with an :class:`~moa_runtime.drafters.ngram.NgramIndex` of the conversation.

    With ``w`` the weight for the length of the matching suffix, a candidate's probability becomes ``(1 - w) * drafter
    + w * index``. A token need not be in the draft vocabulary to be copied.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
        weights: for suffixes of 1 to :data:`~moa_runtime.drafters.ngram.LONGEST_SUFFIX` tokens, each above 0 and
            below 1.
        reach: tokens behind the last one that the target confirmed that are mixed. What is written farther on, when
            the network is away, is the drafter's alone: a text that copies from itself ends in a loop.

    Raises:
        ValueError: other weights than described.
    """

    def __init__(
        self, stop_tokens: Collection[int] = (), *, weights: Sequence[float] = WEIGHTS, reach: int = 16
    ) -> None:
        if len(weights) != LONGEST_SUFFIX or not all(0 < weight < 1 for weight in weights):
            raise ValueError(f"expected {LONGEST_SUFFIX} weights above 0 and below 1, got {weights}")
        self._index = NgramIndex(stop_tokens)
        self._weights, self._reach = tuple(weights), reach
        self._confirmed = 0

    def confirm(self, text: Sequence[int]) -> None:
        """Take ``text``, which the target confirmed, as what is copied from."""
        self._index.update(text)
        self._confirmed = len(text)

    def mix(self, candidates: list[DraftToken], path: Sequence[int]) -> list[DraftToken]:
        """What may follow ``path``, the whole text up to there, best first; more than ``candidates`` where the index
        has others."""
        match = self._index.match(path) if len(path) < self._confirmed + self._reach else None
        if match is None:
            return candidates
        weight = self._weights[match.length - 1]
        mixed = {candidate.token: (1 - weight) * math.exp(candidate.logprob) for candidate in candidates}
        for token, probability in match.probabilities.items():
            mixed[token] = mixed.get(token, 0.0) + weight * probability
        ranked = sorted(mixed.items(), key=lambda item: -item[1])
        # exp() of a hopeless candidate may be 0, which has no logarithm.
        return [DraftToken(token, math.log(probability)) for token, probability in ranked if probability > 0]
