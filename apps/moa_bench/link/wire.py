"""When bytes get through one direction of a link, its delay apart: at once, at a rate, or as a trace says."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.errors import MoaError

PACKET_BYTES = 1500
READ_BYTES = 16 * 1024
CHUNK_S = 0.002  # time of a chunk at most, unless that is less than a packet
WAITING_BYTES = 64 * 1024  # least queue, per connection and direction
WAITING_S = 0.05  # least queue at a high rate: the wire does not fall idle while this process pauses for less
UNLIMITED_QUEUE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Trace:
    """When one direction of a recorded link could deliver a packet (Mahimahi; Netravali et al., USENIX ATC 2015).

    At each time the link passes up to 1500 bytes of what waits; unused room is lost. A time that is listed several
    times is as many opportunities. After the last time the trace repeats, its time 0 at its last time. Opportunities
    are numbered from 0, over all repetitions. ``times_ms``: whole milliseconds after the beginning, ascending, at least
    one of them above 0.
    """

    times_ms: tuple[int, ...]

    def opportunity(self, number: int) -> float:
        """Return the time of opportunity ``number``, seconds after the beginning."""
        repetition, index = divmod(number, len(self.times_ms))
        return (repetition * self.times_ms[-1] + self.times_ms[index]) / 1000

    def next_opportunity(self, seconds: float) -> int:
        """Return the number of the first opportunity that is not before ``seconds``."""
        ms, period = seconds * 1000, self.times_ms[-1]
        repetition = max(0, math.ceil(ms / period) - 1)
        return repetition * len(self.times_ms) + bisect_left(self.times_ms, ms - repetition * period)

    def most_bytes(self, seconds: float) -> int:
        """Return the most bytes that it delivers within any ``seconds``."""
        period = self.times_ms[-1]
        repetitions, ms = divmod(seconds * 1000, period)
        twice = (*self.times_ms, *(time + period for time in self.times_ms))
        most = max(bisect_right(twice, time + ms) - index for index, time in enumerate(self.times_ms))
        return (int(repetitions) * len(self.times_ms) + most) * PACKET_BYTES


def read_trace(path: Path) -> Trace:
    """Read a trace file, one time a line. Raises MoaError: it cannot be read, a line is not a whole number of
    milliseconds or earlier than the line before, or the last time is 0."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise MoaError(f"cannot read the trace {path}: {error.strerror}", code="not_readable") from error
    times: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not (text.isascii() and text.isdigit()):
            message = f"{path}, line {number}: expected a whole number of milliseconds, not {text[:40]!r}"
            raise MoaError(message, code="not_a_number")
        times.append(int(text))
        if number > 1 and times[-2] > times[-1]:
            message = f"{path}, line {number}: {times[-1]} ms is earlier than the {times[-2]} ms of the line before"
            raise MoaError(message, code="out_of_order")
    if not times or times[-1] == 0:
        message = f"{path} is no trace: expected one time in ms a line, the last of them above 0"
        raise MoaError(message, code="no_trace")
    return Trace(tuple(times))


class Wire:
    """Passes bytes in order, here without a limit. Times are seconds of the link's clock and never decrease from call
    to call. ``chunk_bytes``: the most bytes that should be handed to it at once."""

    chunk_bytes = READ_BYTES

    def transmit(self, size: int, now: float) -> float:
        """Queue ``size`` bytes; returns the time at which the last of them is through."""
        return now

    def queue_bytes(self, delay_s: float) -> int:
        """Return how many bytes of a connection may wait or be under way, each for ``delay_s``.

        What is under way does not wait: without room for it, a long delay would lower the rate.
        """
        return UNLIMITED_QUEUE_BYTES


class RateWire(Wire):
    """Passes a number of bits per second."""

    def __init__(self, bits_per_s: float) -> None:
        self.chunk_bytes = min(READ_BYTES, max(PACKET_BYTES, int(bits_per_s * CHUNK_S / 8)))
        self._bits_per_s, self._free_at = bits_per_s, 0.0

    def transmit(self, size: int, now: float) -> float:
        self._free_at = max(self._free_at, now) + size * 8 / self._bits_per_s
        return self._free_at

    def queue_bytes(self, delay_s: float) -> int:
        return _queue_bytes(lambda seconds: int(self._bits_per_s * seconds / 8), delay_s)


class TraceWire(Wire):
    """Passes up to a packet's bytes at each opportunity of a trace, which begins at time 0."""

    chunk_bytes = PACKET_BYTES

    def __init__(self, trace: Trace) -> None:
        self._trace, self._free_at = trace, 0.0
        self._number, self._left = 0, PACKET_BYTES  # the opportunity in use, and its unused bytes

    def transmit(self, size: int, now: float) -> float:
        following = self._trace.next_opportunity(now)
        if following > self._number:
            self._number, self._left = following, PACKET_BYTES
        self._free_at = max(self._free_at, now)
        while size > 0:
            if not self._left:
                self._number, self._left = self._number + 1, PACKET_BYTES
            passed = min(size, self._left)
            self._left -= passed
            size -= passed
            self._free_at = self._trace.opportunity(self._number)
        return self._free_at

    def queue_bytes(self, delay_s: float) -> int:
        return _queue_bytes(self._trace.most_bytes, delay_s)


def wire_of(bits_per_s: float | None, trace: Trace | None) -> Wire:
    """Make the wire of a profile's direction, which has a rate, a trace, or neither."""
    if trace is not None:
        return TraceWire(trace)
    return Wire() if bits_per_s is None else RateWire(bits_per_s)


def _queue_bytes(most_bytes: Callable[[float], int], delay_s: float) -> int:
    return max(WAITING_BYTES, most_bytes(WAITING_S)) + most_bytes(delay_s)
