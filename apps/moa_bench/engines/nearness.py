"""How near a choice of the target was."""

from __future__ import annotations

import random

import numpy as np

from moa_runtime.session.sampling import Sampling
from moa_server.engine import Float32
from moa_server.sampling import choose

#: Changes of all logits that are tried, the smallest first.
CHANGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
#: In float32 engines differ by no more than this in a logit, for all sums are made in another order.
ROUNDING = 1e-3
_TRIES = 64


def nearness(logits: Float32, sampling: Sampling, position: int, token: int, rng: random.Random) -> float | None:
    """By how much logits must change at random for ``token`` to be chosen: the first of :data:`CHANGES` that did it
    once in 64 tries; None where none did. It holds for what is likeliest, for luck and for the edges of masks.

    Args:
        logits: ``[vocab_size]``.
    """
    noise = np.random.default_rng(rng.getrandbits(64))
    for change in CHANGES:
        for _ in range(_TRIES):
            moved = logits + noise.uniform(-change, change, len(logits)).astype(np.float32)
            if choose(moved, sampling, position) == token:
                return change
    return None
