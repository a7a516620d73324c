"""Latency per token of tokens that arrive in bursts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Burst:
    """Number of committed tokens that arrived together, at the time ``at`` (seconds)."""

    at: float
    tokens: int


def token_latencies(bursts: Sequence[Burst]) -> list[float]:
    """Return the seconds of every token after the first burst of one answer.

    A burst of k tokens that comes t seconds after the burst before it gives each of them t / k. The mean is the pace at
    which the text grows, whether tokens come singly or in bursts.

    Example: one token at 1.0 s, three at 1.6 s and one at 1.7 s give ``[0.2, 0.2, 0.2, 0.1]``.
    """
    return [(burst.at - before.at) / burst.tokens for before, burst in pairwise(bursts) for _ in range(burst.tokens)]


def mean_ms(seconds: Sequence[float]) -> float | None:
    """Return the mean in milliseconds; None without samples."""
    return round(1000 * float(np.mean(seconds)), 2) if seconds else None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """Return a percentile in milliseconds, interpolated between samples; None without samples."""
    return round(1000 * float(np.percentile(seconds, percent)), 2) if seconds else None
