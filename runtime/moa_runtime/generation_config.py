"""How the target's authors recommend to sample from it, as a bundle says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecommendedSampling:
    """For chats; nothing follows it by itself.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 is no limit.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1:
            raise ValueError(f"a temperature is 0 or more and top_p above 0 and at most 1, not {self}")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> RecommendedSampling:
        """Raises KeyError, TypeError or ValueError where it is malformed."""
        return cls(float(raw["temperature"]), float(raw["top_p"]))
