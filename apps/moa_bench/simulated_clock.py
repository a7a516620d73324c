"""The time of a benchmark: real, or that of machines which are described by their times."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from moa_runtime.errors import MoaError
from moa_runtime.session.tree import DraftTree

#: Times of a fleet (ms), as of an 8B target on a GPU, phones, and links like ``lte``; see :meth:`Times.parse`.
FLEET_MS = "8,0.8,0.6,0.005,6,0.02,70"


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
        times = _seconds(text)
        if len(times) != 5 or None in times:
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


@dataclass(frozen=True)
class Times(Pace):
    """Times of a device, a link and a verifier that may draft too, in seconds.

    Attributes:
        server_step_s, server_query_s: as of the device's drafter; None for a server that only decodes.
        queue_s: wait of each pass for work that is not simulated.
        jitter: each way of the link takes up to this part longer.
    """

    server_step_s: float | None = None
    server_query_s: float = 0.0
    queue_s: float = 0.0
    jitter: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Times:
        """Parse seven milliseconds with commas between them: the device's step and query, the server's (``-`` for a
        server without a drafter), pass, token and round trip. Raises MoaError."""
        times = _seconds(text)
        if len(times) != 7 or None in (*times[:2], *times[3:]):
            message = f"--times must be seven times in ms, such as {FLEET_MS}, not {text!r}"
            raise MoaError(message, code="out_of_range")
        step, query, server_step, server_query, *rest = times
        return cls(step, query, *rest, server_step, server_query)

    def in_ms(self) -> dict[str, float | None]:
        """Return the times in milliseconds, for JSON; the jitter is a share."""
        ms = {name: None if each is None else round(1000 * each, 4) for name, each in asdict(self).items()}
        names = ("step_s", "query_s", "server_step_s", "server_query_s", "pass_s", "token_s", "queue_s")
        found = {name.removesuffix("_s"): ms[name] for name in names}
        return {**found, "trip": ms["round_trip_s"], "jitter": self.jitter}


def _seconds(text: str) -> list[Any]:
    """Parse milliseconds with commas between them, ``-`` for None; empty if anything else is among them."""
    try:
        times = [None if part.strip() == "-" else float(part) / 1000 for part in text.split(",")]
    except ValueError:
        return []
    return times if all(time is None or 0 <= time < math.inf for time in times) else []


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
