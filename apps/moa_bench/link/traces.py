"""Recorded links: files in the trace format of Mahimahi (Netravali et al., USENIX ATC 2015)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.errors import MoaError

PACKET_BYTES = 1500


@dataclass(frozen=True)
class Trace:
    """When one direction of a link could deliver a packet.

    At each time the link passes up to 1500 bytes of what waits; what it does not use then is lost. A time that
    stands there several times is as many opportunities. When the trace is over it begins again, its time 0 at its
    last time. Opportunities are numbered from 0, over all repetitions.

    Args:
        times_ms: whole milliseconds after the beginning, ascending, at least one of them above 0.
    """

    times_ms: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """How long it lasts until it begins again."""
        return self.times_ms[-1] / 1000

    @property
    def bits_per_s(self) -> float:
        """The mean rate, bit/s, if every opportunity is used."""
        return len(self.times_ms) * PACKET_BYTES * 8 / self.seconds

    def opportunity(self, number: int) -> float:
        """When the opportunity ``number`` is, seconds after the beginning."""
        repetition, index = divmod(number, len(self.times_ms))
        return (repetition * self.times_ms[-1] + self.times_ms[index]) / 1000

    def next_opportunity(self, seconds: float) -> int:
        """The number of the first opportunity that is not before ``seconds``."""
        ms, period = seconds * 1000, self.times_ms[-1]
        repetition = max(0, math.ceil(ms / period) - 1)
        return repetition * len(self.times_ms) + bisect_left(self.times_ms, ms - repetition * period)

    def most_bytes(self, seconds: float) -> int:
        """The most bytes that it delivers within so many seconds, whenever they begin."""
        period = self.times_ms[-1]
        repetitions, ms = divmod(seconds * 1000, period)
        twice = (*self.times_ms, *(time + period for time in self.times_ms))
        most = max(bisect_right(twice, time + ms) - index for index, time in enumerate(self.times_ms))
        return (int(repetitions) * len(self.times_ms) + most) * PACKET_BYTES


def read_trace(path: Path) -> Trace:
    """Read a trace file: one time a line.

    Raises:
        MoaError: it cannot be read, a line is not a whole number of milliseconds or earlier than the line before,
            or the trace lasts no time at all.
    """
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError as error:
        raise MoaError(f"cannot read the trace {path}: {error.strerror}") from error
    times: list[int] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not (text.isascii() and text.isdigit()):
            raise MoaError(f"{path}, line {number}: expected a whole number of milliseconds, not {text[:40]!r}")
        times.append(int(text))
        if number > 1 and times[-2] > times[-1]:
            raise MoaError(
                f"{path}, line {number}: {times[-1]} ms is earlier than the {times[-2]} ms of the line before"
            )
    if not times or times[-1] == 0:
        raise MoaError(f"{path} is no trace: expected one time in ms a line, the last of them above 0")
    return Trace(tuple(times))
