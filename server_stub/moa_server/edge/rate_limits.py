"""Rate limits of a bearer: token buckets that allow debt."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

# Size of a bucket in seconds of its rate: up to that much unused quota accumulates.
BURST_SECONDS = 2.0

Clock = Callable[[], float]


class Kind(enum.Enum):
    """Kind of a charge; the values are the fields of :class:`Budget`."""

    PREFILL_TOKENS = "prefill_tokens_per_second"
    DRAFTED_TOKENS = "drafted_tokens_per_second"
    FRAMES = "frames_per_second"
    ROW_BYTES = "row_bytes_per_second"


@dataclass(frozen=True)
class Budget:
    """Limits of one bearer; None is unlimited."""

    sessions: int | None = None  # sessions open at once
    prefill_tokens_per_second: float | None = None  # prompt tokens that the target processes
    # tokens sent for verification, and tokens drafted by the verifier, which skips its drafts over the limit
    drafted_tokens_per_second: float | None = None
    frames_per_second: float | None = None  # WebSocket messages, and HTTP requests
    row_bytes_per_second: float | None = None  # bytes of memory rows sent


class TokenBucket:
    """A token bucket with debt: a caller waits until the debt of earlier charges is paid, not for its own charge.

    So a charge may be larger than the burst, and the total admitted in t seconds is at most ``burst + rate * t`` plus
    one charge.

    Args:
        rate: units a second, above 0.
        burst: most units in the bucket; it starts full.
        clock: monotonic seconds, such as ``time.monotonic``.
    """

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._at = burst, clock()

    def give_back(self, amount: float) -> None:
        """Refund a charge whose work was not done."""
        self._level = min(self._burst, self._level + amount)

    def take_spare(self, amount: float) -> bool:
        """Charge ``amount`` units if the bucket stays half full, so that no wait comes of it; return whether it did."""
        self.wait_s(0)
        taken = self._level - amount >= self._burst / 2
        self._level -= amount if taken else 0
        return taken

    def wait_s(self, amount: float) -> float:
        """Charge ``amount`` units. Returns the seconds to wait before the work, 0.0 when free."""
        now = self._clock()
        self._level, self._at = min(self._burst, self._level + (now - self._at) * self._rate), now
        before = self._level
        self._level -= amount
        return max(0.0, -before / self._rate)


class Budgets:
    """Usage of one bearer: a token bucket for each rate, ``sessions``, the number of its open sessions, and
    ``compiling``, held while a grammar of its own is compiled."""

    def __init__(self, budget: Budget, clock: Clock) -> None:
        self._clock, self.compiling = clock, asyncio.Lock()
        self.sessions = 0
        self.change(budget)

    def change(self, budget: Budget) -> None:
        """Apply new limits: buckets start full, open sessions stay."""
        self.budget = budget
        rates = [(kind, getattr(budget, kind.value)) for kind in Kind]
        self._buckets = {kind: TokenBucket(r, r * BURST_SECONDS, self._clock) for kind, r in rates if r is not None}

    def open_session(self, most: int | None) -> bool:
        """Open a session; return False if ``most`` are open, None for no limit. Each True needs one
        :meth:`close_session`."""
        if most is not None and self.sessions >= most:
            return False
        self.sessions += 1
        return True

    def close_session(self) -> None:
        """Close a session."""
        self.sessions -= 1

    def give_back(self, kind: Kind, amount: float) -> None:
        """Refund a charge."""
        if kind in self._buckets:
            self._buckets[kind].give_back(amount)

    def wait_s(self, kind: Kind, amount: float) -> float:
        """Charge ``amount``. Returns the seconds to wait before the work, 0.0 when free."""
        return self._buckets[kind].wait_s(amount) if kind in self._buckets else 0.0

    def take_spare(self, kind: Kind, amount: float) -> bool:
        """Charge ``amount`` for what may be left undone, if so much is to spare; return whether it is."""
        return kind not in self._buckets or self._buckets[kind].take_spare(amount)
