"""How the target chooses in an answer: the same for terminal, window and endpoint."""

from __future__ import annotations

import secrets

from moa_chat.history.chat_settings import ChatSettings
from moa_runtime.generation_config import RecommendedSampling
from moa_runtime.session.events import Sampling


def sampling_for(temperature: float, top_p: float, seed: int | None) -> Sampling:
    """Greedy at temperature 0; otherwise with ``seed``, or one that is drawn for this answer."""
    if not temperature:
        return Sampling()
    return Sampling(temperature, top_p, secrets.randbits(63) if seed is None else seed)


def sampling_of(settings: ChatSettings, recommended: RecommendedSampling | None, seed: int | None) -> Sampling:
    """How the target chooses in a chat with these settings; greedy where nobody recommends anything."""
    if not settings.recommended:
        return sampling_for(settings.temperature, settings.top_p, seed)
    return sampling_for(recommended.temperature, recommended.top_p, seed) if recommended else Sampling()
