"""The rule by which a drafter that writes offline stops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Tokens that are searched for repetitions.
_RECENT = 256


@dataclass(frozen=True)
class StoppingRule:
    """Stop a drafter that writes without the target: it predicts a few tokens well but degenerates on long text.

    ``moa-export`` fits the rule to the target's own answers; the defaults are those of the shipped drafter.

    Attributes:
        least_probability: the drafter stops if, by its own estimate, the target keeps the whole text with a lower
            probability.
        repeated: it stops if the newest tokens, this number of them, occur earlier within the last 256 tokens.
        longest: it writes at most this number of tokens; 0 for none.

    Raises:
        ValueError: a number is out of range.
    """

    least_probability: float = 0.4
    repeated: int = 12
    longest: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.least_probability <= 1 or self.repeated < 1 or self.longest < 0:
            raise ValueError(f"a stopping rule is a probability and two numbers of tokens, not {self}")

    def may_continue(self, text: Sequence[int], unconfirmed: int, logprob: float) -> bool:
        """Return whether to write one more token.

        Args:
            text: the conversation, or its end.
            unconfirmed: tokens at its end that the target has not read.
            logprob: log-probability of these tokens together, in nats.
        """
        sure = logprob >= math.log(self.least_probability) if self.least_probability else True
        return sure and unconfirmed < self.longest and not repeats(text, self.repeated, unconfirmed)


def repeats(text: Sequence[int], length: int, new: int) -> bool:
    """Return whether ``new`` is not 0 and the last ``length`` tokens occur earlier within the last 256."""
    recent = list(text[-_RECENT:])
    tail = recent[-length:]
    if not new or len(tail) < length:
        return False
    return any(recent[start : start + length] == tail for start in range(len(recent) - length))
