"""How far the text that a drafter writes alone is worth reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens in which what is written again is looked for.
_RECENT = 256


@dataclass(frozen=True)
class Manners:
    """When a drafter that writes without the target stops: it knows the next words, and cannot hold a thought.

    ``moa-export`` fits them to the target's own answers; the defaults are those of the shipped drafter.

    Attributes:
        least_probability: that the target will keep all of it, by the drafter's own account; below, it stops.
        repeated: it stops where its last so many tokens stood among the newest 256 before.
        longest: tokens that it writes at most; 0, and it writes none.

    Raises:
        ValueError: a number out of range.
    """

    least_probability: float = 0.4
    repeated: int = 12
    longest: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.least_probability <= 1 or self.repeated < 1 or self.longest < 0:
            raise ValueError(f"manners are a probability and numbers of tokens, not {self}")

    def go_on(self, text: Sequence[int], unconfirmed: int, logprob: float) -> bool:
        """Whether one more token is worth writing.

        Args:
            text: the conversation, or its end.
            unconfirmed: tokens of it that the target has not seen.
            logprob: of all these (nats).
        """
        sure = logprob >= math.log(self.least_probability) if self.least_probability else True
        return sure and unconfirmed < self.longest and not repeats(text, self.repeated, unconfirmed)


def repeats(text: Sequence[int], length: int, new: int) -> bool:
    """Whether the last ``length`` tokens stood among the newest ones before, and some of them are ``new``."""
    recent = list(text[-_RECENT:])
    tail = recent[-length:]
    if not new or len(tail) < length:
        return False
    return any(recent[start : start + length] == tail for start in range(len(recent) - length))
