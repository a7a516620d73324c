"""How many files are sent at once, and how fast all of them together: who only reads must not hinder who is served."""

from __future__ import annotations

import time
from collections.abc import Callable

from moa_server.edge.rate_limits import Clock, TokenBucket

#: A download that took nothing for so many seconds, or less than that rate in the last such span, gives way to another.
_SPAN_S, _SLOW = 10.0, 32 << 10


class Download:
    """One under way.

    Args:
        end: closes its connection at once.
    """

    def __init__(self, network: str, began: float, end: Callable[[], None]) -> None:
        self.network, self.end = network, end
        self._last = self._span_began = began
        self._span_bytes = 0
        self._was_slow = False

    def sent(self, count: int, now: float) -> None:
        """So many more bytes were taken by the reader, or by what the system buffers for it.

        The system takes megabytes at once of a reader that stands still, so what counts is not the average since the
        beginning.
        """
        took = now - self._span_began
        if took >= _SPAN_S:
            self._was_slow = self._span_bytes < _SLOW * took
            self._span_began, self._span_bytes = now, 0
        self._span_bytes += count
        self._last = now

    def slow(self, now: float) -> bool:
        """Whether it may be ended for another."""
        return self._was_slow or now - self._last >= _SPAN_S


class Downloads:
    """The downloads under way, at most ``most``, and of one network half of them.

    Where no more may run, one that reads more slowly than 32 KiB a second gives way, the oldest first: so a crowd that
    reads next to nothing keeps nobody out, and who was cut off goes on where he was.

    Args:
        most: at once.
        bytes_per_second: of all together. Faster readers wait: on a fast network a download of a hundred megabytes
            would otherwise take a processor away from the target for seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, most: int = 64, bytes_per_second: float = 32 << 20, clock: Clock = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._pace = TokenBucket(bytes_per_second, bytes_per_second / 8, clock)
        self._running: dict[Download, None] = {}  # for its order

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, network: str, end: Callable[[], None]) -> Download | None:
        """A place for one more, to be given back with :meth:`over`; None where there is none."""
        now = self._clock()
        own = [each for each in self._running if each.network == network]
        if len(own) >= max(1, self.most // 2):
            rivals = own
        elif len(self._running) >= self.most:
            rivals = list(self._running)
        else:
            rivals = None
        if rivals is not None:
            slow = next((each for each in rivals if each.slow(now)), None)
            if slow is None:
                return None
            self.over(slow)
            slow.end()
        begun = Download(network, now, end)
        self._running[begun] = None
        return begun

    def over(self, download: Download) -> None:
        """It has ended, or is about to."""
        self._running.pop(download, None)

    def wait_s(self, download: Download, count: int) -> float:
        """How long to wait before its next bytes are sent, so many; what was sent before has been taken."""
        download.sent(count, self._clock())
        return self._pace.wait_s(count)
