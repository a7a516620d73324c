"""The time of a benchmark: real, or that of a device, a link and a target that are described by their times."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass

from moa_runtime.errors import MoaError
from moa_runtime.session.tree import DraftTree


@dataclass(frozen=True)
class Pace:
    """The times of a device, a link and a target, in seconds.

    Attributes:
        step_s, query_s: a step of the drafter, and each node that it continues.
        pass_s, token_s: a pass of the target, and each token in it.
        round_trip_s: there and back, without the target.
    """

    step_s: float
    query_s: float
    pass_s: float
    token_s: float
    round_trip_s: float

    @classmethod
    def parse(cls, text: str) -> Pace:
        """Parse five milliseconds with commas between them, in the order of the attributes. Raises MoaError."""
        try:
            times = [float(part) / 1000 for part in text.split(",")]
        except ValueError:
            times = []
        if len(times) != 5 or not all(0 <= time < math.inf for time in times):
            message = (
                "--pace must be five times in ms, STEP,QUERY,PASS,TOKEN,ROUND_TRIP, none of them negative, such as "
                f"3,0.3,30,0.05,40, not {text!r}"
            )
            raise MoaError(message, code="out_of_range")
        return cls(*times)

    def in_ms(self) -> dict[str, float]:
        """Return the times in milliseconds, for JSON."""
        return {name.removesuffix("_s"): round(1000 * seconds, 4) for name, seconds in asdict(self).items()}

    def draft_s(self, tree: DraftTree) -> float:
        """Return the seconds for drafting ``tree``."""
        return len(tree.steps) * self.step_s + sum(tree.steps) * self.query_s

    def compute_s(self, tokens: int) -> float:
        """Return the seconds of a pass over ``tokens`` tokens."""
        return self.pass_s + tokens * self.token_s


class Clock:
    """The real clock; with a pace, one that only advances by the times of the pace."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace
        self._now = 0.0

    def now(self) -> float:
        """Return seconds, monotonic."""
        return time.perf_counter() if self.pace is None else self._now

    def drafted(self, tree: DraftTree, began: float) -> float:
        """Account for a draft begun at ``began``; returns the seconds that it took."""
        if self.pace is not None:
            self._now += self.pace.draft_s(tree)
        return self.now() - began

    def answer_at(self, compute_s: float) -> float:
        """Return when the answer to a frame arrives that is sent now and takes the target ``compute_s``; with no pace,
        now."""
        return self.now() if self.pace is None else self._now + self.pace.round_trip_s + compute_s

    def wait_until(self, moment: float) -> None:
        """Advance to ``moment``; the real clock has reached it already."""
        self._now = max(self._now, moment)
