"""When bytes get through one direction of a link, its delay apart: at once, at a rate, or as a trace says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moa_bench.link.traces import PACKET_BYTES, Trace

READ_BYTES = 16 * 1024
CHUNK_S = 0.002  # time of a chunk at most, unless that is less than a packet
WAITING_BYTES = 64 * 1024  # what may wait at least, per connection and direction
WAITING_S = 0.05  # and for how long at a high rate: while this process pauses for less, the wire does not fall idle
UNLIMITED_QUEUE_BYTES = 1024 * 1024


class Wire(Protocol):
    """Passes bytes in order. Times are seconds of the link's clock and never decrease from call to call.

    Attributes:
        chunk_bytes: the most bytes that should be handed to it at once.
    """

    chunk_bytes: int

    def transmit(self, size: int, now: float) -> float:
        """Let ``size`` bytes wait behind those before; returns when the last of them is through."""

    def queue_bytes(self, delay_s: float) -> int:
        """How many bytes of a connection may wait or be under way, where each is under way for ``delay_s``.

        What is under way does not wait: without room for it, a long delay would lower the rate.
        """


class UnlimitedWire:
    """Everything is through at once."""

    chunk_bytes = READ_BYTES

    def transmit(self, size: int, now: float) -> float:
        return now

    def queue_bytes(self, delay_s: float) -> int:
        return UNLIMITED_QUEUE_BYTES


class RateWire:
    """So many bits per second."""

    def __init__(self, bits_per_s: float) -> None:
        self.chunk_bytes = min(READ_BYTES, max(PACKET_BYTES, int(bits_per_s * CHUNK_S / 8)))
        self._bits_per_s = bits_per_s
        self._free_at = 0.0

    def transmit(self, size: int, now: float) -> float:
        self._free_at = max(self._free_at, now) + size * 8 / self._bits_per_s
        return self._free_at

    def queue_bytes(self, delay_s: float) -> int:
        return _queue_bytes(lambda seconds: int(self._bits_per_s * seconds / 8), delay_s)


class TraceWire:
    """Up to a packet's bytes at each opportunity of a trace, which begins at time 0."""

    chunk_bytes = PACKET_BYTES

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._number = 0  # the opportunity in use,
        self._left = PACKET_BYTES  # and the bytes it still has room for
        self._free_at = 0.0

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
    """The wire of a profile's direction, which has a rate, a trace, or neither."""
    if trace is not None:
        return TraceWire(trace)
    return UnlimitedWire() if bits_per_s is None else RateWire(bits_per_s)


def _queue_bytes(most_bytes: Callable[[float], int], delay_s: float) -> int:
    """``most_bytes``: the most that the wire passes in so many seconds."""
    return max(WAITING_BYTES, most_bytes(WAITING_S)) + most_bytes(delay_s)
