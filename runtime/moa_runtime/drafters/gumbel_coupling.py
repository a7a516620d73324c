"""Guessing with the target's own luck (drafter-invariant coupling, arXiv 2408.07978)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moa_runtime.drafters.base import GREEDY, DraftToken
from moa_runtime.gumbel import Float64, gumbel, gumbel_of
from moa_runtime.session.events import Sampling

#: How far the noise is to be trusted, since a drafter's probabilities are not quite the target's: 1 would be for those.
#: And what the noise adds to the probability of all other tokens together (nats, at temperature 1). By maximum
#: likelihood on held-out answers of the default target.
TRUST, OTHERS = 0.84, 2.1
_LEAST = 1e-4  # probability of what is no candidate
_HOPELESS = -1e4  # nats; as if no candidate had less, so that all have an order
_HOTTEST = 100.0  # as if no temperature were higher


class Luck:
    """What the target's noise makes of a drafter's candidates.

    The target takes the token with the largest ``log p / T + noise`` (:mod:`moa_runtime.gumbel`). The chance that this
    is a candidate of probability ``q`` is taken to be the share of ``q * exp(TRUST * t * noise)``, where what is no
    candidate has ``rest * exp(OTHERS * t**2)``, and ``t`` is ``T * top_p``: a nucleus leaves the noise less to decide.
    At temperature 0 the chance is ``q``.

    Where the form comes from: if the drafter's ``log q`` is off by errors with the Gumbel distribution, the token with
    the largest sum is each by its share in a softmax; and the mean of ``exp(x * noise)`` is ``gamma(1 - x)``.

    Args:
        sampling: how the target chooses; where it takes the likeliest token nothing is changed.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._seed = sampling.seed
        self._heat = min(max(0.0, sampling.temperature), _HOTTEST) * min(max(0.0, sampling.top_p), 1.0)

    def ranked(self, alternatives: Sequence[list[DraftToken]], position: int) -> list[list[DraftToken]]:
        """The candidates for the absolute ``position`` behind each of several paths, best first, each with its chance
        in the place of its probability."""
        if not self._heat:
            return list(alternatives)
        noise = gumbel(self._seed, position, [each.token for candidates in alternatives for each in candidates])
        ends = np.cumsum([len(candidates) for candidates in alternatives])[:-1]
        return [self._scored(*pair) for pair in zip(alternatives, np.split(noise, ends), strict=True)]

    def best(self, candidates: Sequence[DraftToken], position: int) -> DraftToken:
        """The best of the candidates, of equals the first."""
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


#: Of a target that takes the likeliest token.
NO_LUCK = Luck(GREEDY)
