"""How the target chooses a token: a function of its logits, the sampling, and the absolute position.

Nothing else enters, above all no history of earlier draws: whatever was drafted, lost, sent twice or
decided again, the same position gets the same random number, and so the same token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moa_runtime.session.server import Sampling

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_SEED_BITS = (1 << 64) - 1
#: The nucleus is looked for among so many of the largest weights first.
_FEW = 1024


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position: Philox keyed by ``seed``, its counter at ``position``."""
    return np.random.Generator(np.random.Philox(key=seed & _SEED_BITS, counter=position)).random()


def choose(logits: Float32, sampling: Sampling, position: int) -> int:
    """The target's token for the absolute ``position``.

    Greedy (the lowest id among equals) where the temperature is 0 or no positive number; else the
    inverse of the cumulative distribution at :func:`uniform`, in the order of token ids. That order
    makes the choice robust: rounding in the logits moves every cumulative sum by as little, while in
    an order by probability it would swap neighbours.

    Args:
        logits: ``[vocab_size]``; NaN counts as minus infinity.
    """
    # The wire carries float32, so a temperature given as float64 must mean the same here.
    temperature = float(np.float32(sampling.temperature))
    best = int(logits.argmax())  # the first NaN, if there is one
    if np.isnan(logits[best]):
        logits = np.where(np.isnan(logits), -np.inf, logits)
        best = int(logits.argmax())
    if not temperature > 0 or not np.isfinite(logits[best]):
        return best
    weights = np.exp((logits.astype(np.float64) - float(logits[best])) / temperature)
    top_p = float(np.float32(sampling.top_p))
    if 0 < top_p < 1:
        weights = nucleus(weights, top_p)
    cumulative = np.cumsum(weights)
    point = uniform(sampling.seed, position) * cumulative[-1]
    # The first id whose sum exceeds the point; one of weight 0 never does.
    return int(min(np.searchsorted(cumulative, point, side="right"), np.flatnonzero(weights)[-1]))


def nucleus(weights: Float64, top_p: float) -> Float64:
    """Set all but the smallest set of largest weights that holds a share of ``top_p`` to 0.

    Of equal weights at its edge the lower ids stay. ``nucleus([1, 5, 3, 1], 0.85)`` -> ``[1, 5, 3, 0]``.
    """
    share = top_p * float(weights.sum())
    descending = np.sort(np.partition(weights, -_FEW)[-_FEW:] if len(weights) > _FEW else weights)[::-1]
    cumulative = np.cumsum(descending)
    if cumulative[-1] < share:  # seldom: sorting them all takes most of the time
        descending = np.sort(weights)[::-1]
        cumulative = np.cumsum(descending)
    count = int(np.searchsorted(cumulative, share, side="left")) + 1
    edge = descending[min(count, len(descending)) - 1]
    kept = weights > edge
    at_edge = np.flatnonzero(weights == edge)
    kept[at_edge[: count - int(kept.sum())]] = True
    return np.where(kept, weights, 0.0)
