"""How long to draft before asking the target."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Literal, Protocol

#: Tokens of each draft, or as many as pay.
DraftLength = int | Literal["auto"]


@dataclass(frozen=True)
class RoundOutcome:
    """A draft and its verdict.

    Attributes:
        drafted: tokens sent.
        accepted: of them.
        steps: tokens of them that were drafted one by one; others may have come without a step of the model.
        draft_s: seconds that the steps took, all together.
        round_trip_s: seconds from sending to the verdict.
    """

    drafted: int
    accepted: int
    steps: int
    draft_s: float
    round_trip_s: float


class Controller(Protocol):
    """Decides the draft length of each round from the draft itself and from what earlier rounds showed."""

    def goes_on(self, drafted: int, logprob: float) -> bool:
        """Whether to draft another token before asking.

        Args:
            drafted: tokens of the draft so far.
            logprob: the drafter's log-probability of all of them (nats).
        """

    def ahead(self) -> int:
        """Tokens to draft on while a verdict is on its way (optimistic drafting)."""

    def observe(self, outcome: RoundOutcome) -> None:
        """A round has ended."""


@dataclass(frozen=True)
class FixedLength:
    """Always the same draft length.

    ``lookahead`` pays only where whole drafts are often accepted: what is written ahead is kept only
    when the draft before it, and the bonus token after that, were right.
    """

    length: int = 6
    lookahead: int = 0

    def goes_on(self, drafted: int, logprob: float) -> bool:
        return drafted < self.length

    def ahead(self) -> int:
        return self.lookahead

    def observe(self, outcome: RoundOutcome) -> None:
        return


class Throughput:
    """Drafts on while the next token is expected to bring more tokens a second than the rounds so far.

    With ``p`` the probability that all drafted tokens are right, ``q`` the share of tokens that are right where those
    before them are, ``cost`` the seconds of one more token and ``rate`` the tokens a second of the rounds so far, it
    goes on while ``p * q > rate * cost``: the rule that makes tokens per second largest once ``rate`` is what it
    brings (Dinkelbach 1967, "On nonlinear fractional programming"). The cost is the device's step and what round trips
    were longer for each token they carried. So a slow link makes drafts longer, a slow device, a target that feels
    every token, or a drafter in doubt shorter.

    Averages forget: a round counts 0.95 times the one after it. One token is always drafted, or nothing would be
    learnt.

    Args:
        longest: tokens of a draft.
    """

    def __init__(self, longest: int = 16) -> None:
        self._longest = longest
        self._tokens = self._seconds = 0.0
        self._steps = self._step_seconds = 0.0
        # As if a few tokens had been judged before: one round says little.
        self._right, self._judged = 3.0, 6.0
        self._verification = _Slope()

    def goes_on(self, drafted: int, logprob: float) -> bool:
        if not 0 < drafted < self._longest:
            return drafted == 0
        return math.exp(logprob) * self._right / self._judged > self._price()

    def ahead(self) -> int:
        return 0

    def observe(self, outcome: RoundOutcome) -> None:
        self._tokens = _MEMORY * self._tokens + outcome.accepted + 1
        self._seconds = _MEMORY * self._seconds + outcome.draft_s + outcome.round_trip_s
        self._steps = _MEMORY * self._steps + outcome.steps
        self._step_seconds = _MEMORY * self._step_seconds + outcome.draft_s
        self._right = _MEMORY * self._right + outcome.accepted
        self._judged = _MEMORY * self._judged + min(outcome.accepted + 1, outcome.drafted)
        self._verification.add(outcome.drafted, outcome.round_trip_s)

    def _price(self) -> float:
        """Tokens that rounds bring in the time of one more token."""
        if not self._steps or not self._seconds:
            return _FIRST_PRICE
        cost = self._step_seconds / self._steps + max(0.0, self._verification.slope)
        return self._tokens / self._seconds * cost


class _Slope:
    """Least squares by weighted means: what was added counts less and less, and a few points make a level line."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._weight = _LONG_MEMORY * self._weight + 1
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._weight
        self._y += dy / self._weight
        self._xx = _LONG_MEMORY * self._xx + dx * (x - self._x)
        self._xy = _LONG_MEMORY * self._xy + dx * (y - self._y)

    @property
    def slope(self) -> float:
        return self._xy / (self._xx + _DOUBT)


_MEMORY = 0.95
_LONG_MEMORY = 0.99  # round trips vary by more than a token costs
_DOUBT = 10.0
_FIRST_PRICE = 0.15


def controller_for(length: DraftLength) -> Controller:
    """:class:`Throughput` for ``"auto"``, otherwise :class:`FixedLength`."""
    return Throughput() if length == "auto" else FixedLength(length)


def draft_length_of(text: str) -> DraftLength:
    """As written on a command line. Raises ArgumentTypeError: neither a whole number nor ``auto``."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number or auto, not {text!r}") from None
