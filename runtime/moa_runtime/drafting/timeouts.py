"""Timers of a link: late verdicts, outages, frames to send again. The host passes the time in."""

from __future__ import annotations

import enum
import math

from moa_runtime.options import LoopSettings

#: Seconds that a draft waits for the memory rows that follow a verdict, before it is made without them.
_ROWS_PATIENCE_S = 0.25
#: Number of sent frames whose times are kept until the server echoes their stamps.
_STAMPS = 32


class Alarm(enum.Enum):
    """A timer that has run out."""

    LATE = "the verdict is late"  # some time after a frame was sent, until its verdict
    OUTAGE = "the link is down for good"  # some time after the link went down, until a Welcome
    RESEND = "the frame in flight has to be sent again"  # at the time that the server asked for


class Timeouts:
    """Keep the timers of one link. Times are in seconds of any monotonic clock.

    Attributes:
        late, outage: whether these alarms have begun and not ended; a link that was never up is an outage.
    """

    def __init__(self, settings: LoopSettings) -> None:
        self.late = False
        self.outage = True
        self._settings = settings
        self._sent_at: float | None = None
        self._patience = math.inf
        self._down_since: float | None = None
        self._resend_at: float | None = None
        self._rows_by: float | None = None
        self._stamps: dict[int, float] = {}  # by stamp: when its frame was sent

    def stamped(self, newest: int, now: float) -> None:
        """Note that frames with stamps up to ``newest`` were sent."""
        if newest not in self._stamps:
            known = next(reversed(self._stamps), newest - 1)
            for stamp in range(known + 1, newest + 1) if 0 < newest - known <= _STAMPS else (newest,):
                self._stamps[stamp] = now
            while len(self._stamps) > _STAMPS:
                del self._stamps[next(iter(self._stamps))]

    def echoed(self, stamp: int, held_s: float, now: float) -> float | None:
        """Return the round trip in seconds that an echoed stamp shows; None if it was not sent on this connection.

        Args:
            held_s: seconds for which the server held the frame before it answered.
        """
        sent = self._stamps.pop(stamp, None)
        return None if sent is None else max(0.0, now - sent - held_s)

    def await_rows(self, now: float) -> None:
        """Note that memory rows follow the verdict that arrived."""
        self._rows_by = now + _ROWS_PATIENCE_S

    def rows_may_come(self, now: float) -> bool:
        """Return whether a draft should still wait for memory rows."""
        return self._rows_by is not None and now < self._rows_by

    @property
    def waiting(self) -> bool:
        """Whether an answer is awaited."""
        return self._sent_at is not None

    def sent(self, now: float, *, prefill: bool) -> None:
        """Note that a frame was sent that will be answered; ``prefill`` if it is a prompt."""
        settings = self._settings
        self._sent_at, self._patience = now, settings.prefill_late_after_s if prefill else settings.late_after_s

    def answered(self, now: float) -> float:
        """Note that the outstanding frame was answered; return its latency in seconds."""
        waited_s = 0.0 if self._sent_at is None else max(0.0, now - self._sent_at)  # it may have arrived before
        self.idle()
        return waited_s

    def idle(self) -> None:
        """Note that no answer is awaited."""
        self._sent_at, self.late = None, False

    def resend(self, at: float) -> None:
        """Have the outstanding frame sent again, not earlier than ``at``."""
        self._resend_at = at

    def up(self) -> None:
        """Note that the link is up."""
        self.outage, self._down_since = False, None

    def down(self, now: float, *, on_purpose: bool = False) -> None:
        """Note that the link is down, since ``now`` if it was up; ``on_purpose`` begins the outage at once."""
        if on_purpose:
            self._down_since = -math.inf
        elif self._down_since is None and not self.outage:
            self._down_since = now
        self._resend_at = self._rows_by = None
        self._stamps.clear()
        self.idle()

    def wake_at(self, now: float) -> float | None:
        """Return when the next alarm begins, or the patience for rows ends; None for never."""
        times = [at for at in self._alarms().values() if at < math.inf]
        if self._rows_by is not None and now < self._rows_by:
            times.append(self._rows_by)
        return min(times, default=None)

    def passed(self, now: float) -> list[Alarm]:
        """Return the alarms that begin now."""
        begun = [alarm for alarm, at in self._alarms().items() if at <= now]
        if Alarm.LATE in begun:
            self.late = True
        if Alarm.OUTAGE in begun:
            self.outage, self._down_since = True, None
        if Alarm.RESEND in begun:
            self._resend_at = None
        return begun

    def _alarms(self) -> dict[Alarm, float]:
        sent, down, resend = self._sent_at, self._down_since, self._resend_at
        return {
            Alarm.LATE: math.inf if sent is None or self.late else sent + self._patience,
            Alarm.OUTAGE: math.inf if down is None or self.outage else down + self._settings.outage_after_s,
            Alarm.RESEND: math.inf if resend is None else resend,
        }
