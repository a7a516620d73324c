"""How the target chooses in an answer: the same for terminal, window and endpoint."""

from __future__ import annotations

import secrets

from moa_runtime.session.events import Sampling


def sampling_for(temperature: float, top_p: float, seed: int | None) -> Sampling:
    """Greedy at temperature 0; otherwise with ``seed``, or one that is drawn for this answer."""
    if not temperature:
        return Sampling()
    return Sampling(temperature, top_p, secrets.randbits(63) if seed is None else seed)
