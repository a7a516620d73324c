"""What scenarios over recorded answers are drawn by."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    """A number between two positive ones, of which any factor is as likely as any other of its size."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def some_answers(rng: random.Random, lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Numbers of answers, in any order: so many that they have ``tokens`` tokens together, or all.

    Args:
        lengths: tokens of each answer there is.
    """
    order = rng.sample(range(len(lengths)), len(lengths))
    taken = next((n for n in range(len(order)) if sum(lengths[at] for at in order[:n]) >= tokens), len(order))
    return tuple(order[:taken])
