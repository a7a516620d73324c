"""Rank candidates with the target's own Gumbel noise (drafter-invariant coupling, arXiv 2408.07978)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moa_runtime.drafters.base import GREEDY, DraftToken
from moa_runtime.gumbel import Float64, gumbel, gumbel_of
from moa_runtime.session.events import Sampling

#: Weight of the noise: it would be 1 if the drafter's probabilities were the target's. And the log-probability (nats,
#: at temperature 1) that the noise adds to all other tokens together. Maximum likelihood on held-out answers of the
#: default target.
TRUST, OTHERS = 0.84, 2.1
_LEAST = 1e-4  # probability of the tokens outside the candidate list
_HOPELESS = -1e4  # nats; lower bound, so that all candidates have an order
_HOTTEST = 100.0  # upper bound of the temperature


class GumbelCoupling:
    """Turn a drafter's probabilities into chances of being the target's choice, given the target's noise.

    The target takes the token with the largest ``log p / T + noise`` (:mod:`moa_runtime.gumbel`). The chance that this
    is a candidate of probability ``q`` is its share of ``q * exp(TRUST * t * noise)``; tokens outside the candidate
    list share ``rest * exp(OTHERS * t**2)``. ``t`` is ``T * top_p``, because a nucleus leaves the noise less to decide.
    At temperature 0 the chance is ``q``.

    Derivation: if the errors of the drafter's ``log q`` follow the Gumbel distribution, the chance of having the
    largest sum is a softmax share; and the mean of ``exp(x * noise)`` is ``gamma(1 - x)``.

    Args:
        sampling: how the target chooses; for greedy choices nothing changes.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._seed = sampling.seed
        self._heat = min(max(0.0, sampling.temperature), _HOTTEST) * min(max(0.0, sampling.top_p), 1.0)

    def ranked(self, alternatives: Sequence[list[DraftToken]], position: int) -> list[list[DraftToken]]:
        """Rank the candidates for the absolute ``position`` after each of several paths, best first, with chances in
        place of their probabilities."""
        if not self._heat:
            return list(alternatives)
        noise = gumbel(self._seed, position, [each.token for candidates in alternatives for each in candidates])
        ends = np.cumsum([len(candidates) for candidates in alternatives])[:-1]
        return [self._scored(*pair) for pair in zip(alternatives, np.split(noise, ends), strict=True)]

    def best(self, candidates: Sequence[DraftToken], position: int) -> DraftToken:
        """Return the best candidate, the first one of equals."""
        if not self._heat:
            return max(candidates, key=lambda candidate: candidate.logprob)
        noise = [gumbel_of(self._seed, position, candidate.token) for candidate in candidates]
        return self._scored(candidates, np.array(noise))[0]

    def _scored(self, candidates: Sequence[DraftToken], noise: Float64) -> list[DraftToken]:
        logprobs = np.maximum([candidate.logprob for candidate in candidates], _HOPELESS)
        rest = math.log(max(_LEAST, 1.0 - float(np.exp(logprobs).sum())))
        scores = logprobs + TRUST * self._heat * noise
        whole = np.logaddexp.reduce([*scores, rest + OTHERS * self._heat**2])
        order = np.argsort(-scores, kind="stable")
        return [DraftToken(candidates[at].token, float(scores[at] - whole)) for at in order]


#: For a target that chooses greedily.
NO_COUPLING = GumbelCoupling(GREEDY)
