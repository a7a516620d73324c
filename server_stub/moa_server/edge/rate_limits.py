"""What a bearer may use a second: token buckets that allow debt."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

# A bucket holds what so many seconds bring: a caller who was idle may catch up that much.
BURST_SECONDS = 2.0

Clock = Callable[[], float]


class Kind(enum.Enum):
    """What is charged; the values are the fields of :class:`Budget`."""

    PREFILL_TOKENS = "prefill_tokens_per_second"
    DRAFTED_TOKENS = "drafted_tokens_per_second"
    FRAMES = "frames_per_second"
    ROW_BYTES = "row_bytes_per_second"


@dataclass(frozen=True)
class Budget:
    """What one bearer may use; None is unlimited.

    Attributes:
        sessions: open at once.
        prefill_tokens_per_second: prompt tokens that the target reads.
        drafted_tokens_per_second: tokens sent for verification, and those that the verifier drafts itself; it does
            without where its bearer would have to wait for them.
        frames_per_second: WebSocket messages, and HTTP requests.
        row_bytes_per_second: bytes of memory rows sent.
    """

    sessions: int | None = None
    prefill_tokens_per_second: float | None = None
    drafted_tokens_per_second: float | None = None
    frames_per_second: float | None = None
    row_bytes_per_second: float | None = None


class TokenBucket:
    """A token bucket with debt: whoever comes waits until the debt of those before is paid, not for its own charge.

    So a charge larger than the burst is possible, and everything admitted in a span of t seconds is at most
    ``burst + rate * t`` and one charge.

    Args:
        rate: units a second, above 0.
        burst: units the bucket holds at most; it begins full.
        clock: seconds that do not decrease, such as ``time.monotonic``.
    """

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        if not rate > 0 or not burst >= 0:
            raise ValueError(f"rate must be above 0 and burst at least 0, not {rate} and {burst}")
        self._rate, self._burst, self._clock = rate, burst, clock
        self._level, self._at = burst, clock()

    def give_back(self, amount: float) -> None:
        """Take a charge back: what it was for was not done."""
        self._level = min(self._burst, self._level + amount)

    def wait_s(self, amount: float) -> float:
        """Charge ``amount`` units. Returns the seconds the caller must wait before going on, 0.0 when free.

        Raises:
            ValueError: a negative amount.
        """
        if amount < 0:
            raise ValueError(f"a charge must be at least 0, not {amount}")
        now = self._clock()
        self._level, self._at = min(self._burst, self._level + (now - self._at) * self._rate), now
        before = self._level
        self._level -= amount
        return max(0.0, -before / self._rate)


class Budgets:
    """The state of one bearer's budget: sessions that are open, and a bucket for everything counted by the second."""

    def __init__(self, budget: Budget, clock: Clock) -> None:
        self._clock = clock
        self._sessions = 0
        self.change(budget)

    def change(self, budget: Budget) -> None:
        """Go on with another budget: full buckets, and the sessions that are open."""
        self.budget = budget
        rates = {kind: getattr(budget, kind.value) for kind in Kind}
        self._buckets = {
            kind: TokenBucket(rate, rate * BURST_SECONDS, self._clock)
            for kind, rate in rates.items()
            if rate is not None
        }

    @property
    def sessions(self) -> int:
        """Sessions open now."""
        return self._sessions

    def open_session(self) -> bool:
        """Take a slot for a session; False when all are taken. Each True needs one :meth:`close_session`."""
        if self.budget.sessions is not None and self._sessions >= self.budget.sessions:
            return False
        self._sessions += 1
        return True

    def close_session(self) -> None:
        if not self._sessions:
            raise RuntimeError("no session is open")
        self._sessions -= 1

    def give_back(self, kind: Kind, amount: float) -> None:
        """Take a charge back."""
        bucket = self._buckets.get(kind)
        if bucket:
            bucket.give_back(amount)

    def wait_s(self, kind: Kind, amount: float) -> float:
        """Charge ``amount``. Returns the seconds the caller must wait before going on, 0.0 when free."""
        bucket = self._buckets.get(kind)
        return bucket.wait_s(amount) if bucket else 0.0
