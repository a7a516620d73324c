"""Sampling: the target's token as a function of its logits, the sampling settings and the absolute position.

There is no history of earlier draws: however often a position is drafted, lost, resent or decided again, it gets the
same noise, and so the same token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moa_runtime.drafters.gumbel import MOST, gumbel
from moa_runtime.session.events import Sampling

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Number of the largest weights among which the nucleus is searched first.
_FEW = 1024
#: Tokens within this distance (nats) of the best one are tried first; usually no other can win.
_NEAR = 6.0
_LARGEST = float(np.finfo(np.float32).max)


def choose(logits: Float32, sampling: Sampling, position: int) -> int:
    """Choose the target's token for the absolute ``position``.

    Greedy (the lowest id among equals) if the temperature is not above 0. Otherwise, of the tokens that the masks
    leave, the one with the largest ``logit / temperature + noise`` (of equals the lowest id), with the noise of
    :func:`moa_runtime.drafters.gumbel.gumbel`: so each is chosen with its probability in the softmax, and a drafter
    with the same noise guesses well. In float64, so rounding decides about once in 10**12 choices.

    The masks, one after the other, each by the probabilities that the temperature and the masks before leave:
    ``top_k``, ``top_p``, ``min_p``. That is the order of transformers (``GenerationMixin``); vLLM has the temperature
    first too, llama.cpp last.

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
    scaled = (logits.astype(np.float64) - float(logits[best])) / min(temperature, _LARGEST)
    tokens = _unmasked(scaled, sampling)
    if tokens is not None:
        scaled = scaled[tokens]
    near = np.flatnonzero(scaled > -_NEAR)
    score = (scaled[near] + gumbel(sampling.seed, position, near if tokens is None else tokens[near])).max()
    able = np.flatnonzero(scaled + MOST >= score)
    ids = able if tokens is None else tokens[able]
    return int(ids[(scaled[able] + gumbel(sampling.seed, position, ids)).argmax()])


def _unmasked(scaled: Float64, sampling: Sampling) -> Int64 | None:
    """The tokens that the masks leave, ascending; None for all.

    Args:
        scaled: logits by temperature, the largest of them 0.
    """
    top_p, min_p = float(np.float32(sampling.top_p)), float(np.float32(sampling.min_p))
    counted = 0 < sampling.top_k < len(scaled)
    if not counted and not 0 < top_p < 1 and not min_p > 0:
        return None
    weights = np.exp(scaled)
    if counted:
        weights = np.where(largest(weights, sampling.top_k), weights, 0.0)
    if 0 < top_p < 1:
        weights = np.where(nucleus(weights, top_p), weights, 0.0)
    return np.flatnonzero(weights >= min(min_p, 1.0) if min_p > 0 else weights)


def largest(weights: Float64, count: int) -> Mask:
    """Return a mask of the ``count`` largest weights; of equal ones at the edge, those of lower ids."""
    return _down_to(weights, np.partition(weights, -count)[-count], count)


def nucleus(weights: Float64, top_p: float) -> Mask:
    """Return a mask of the smallest set of largest weights that holds a share of ``top_p``.

    Of equal weights at its edge it has the lower ids. ``nucleus([1, 5, 3, 1], 0.85)`` ->
    ``[True, True, True, False]``.
    """
    share = top_p * float(weights.sum())
    descending = np.sort(np.partition(weights, -_FEW)[-_FEW:] if len(weights) > _FEW else weights)[::-1]
    cumulative = np.cumsum(descending)
    if cumulative[-1] < share:  # seldom: sorting them all takes most of the time
        descending = np.sort(weights)[::-1]
        cumulative = np.cumsum(descending)
    count = min(int(np.searchsorted(cumulative, share, side="left")) + 1, len(descending))
    return _down_to(weights, descending[count - 1], count)


def _down_to(weights: Float64, edge: float, count: int) -> Mask:
    kept = weights > edge
    kept[np.flatnonzero(weights == edge)[: count - int(kept.sum())]] = True
    return kept
