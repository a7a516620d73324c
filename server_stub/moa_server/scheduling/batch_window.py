"""Batch window: wait briefly for announced jobs, so that they share one step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

#: Fraction of the last step's time that the next step may wait.
_PATIENCE = 0.25
_MEMORY = 0.9  # weight of the old mean of preparation times


class BatchWindow:
    """Announced jobs that the next step waits for. Without the wait, each conversation whose draft is made while the
    step of the others runs would end up with a pass of its own.

    The next step waits at most a quarter of a step time, and only if drafts usually finish within it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._usual_s = 0.0
        self._none = asyncio.Event()

    @property
    def any(self) -> bool:
        """Whether a job is being prepared."""
        return self._count > 0

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """Announce a job: it is prepared in this block and submitted after it."""
        began = self._clock()
        self._count += 1
        self._none.clear()
        try:
            yield
        finally:
            self._usual_s += (1 - _MEMORY) * (self._clock() - began - self._usual_s)
            self._count -= 1
            if not self._count:
                self._none.set()

    async def wait(self, step_s: float) -> bool:
        """Wait until no job is being prepared any more; return whether there was anything to wait for.

        Args:
            step_s: seconds that a step takes.
        """
        most_s = _PATIENCE * step_s
        if not self.any or self._usual_s > most_s:
            return False
        none = asyncio.ensure_future(self._none.wait())
        await asyncio.wait({none}, timeout=most_s)
        none.cancel()
        return True
