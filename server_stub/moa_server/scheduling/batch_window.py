"""Jobs that are about to be handed in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

#: Part of the last step's time that the next may wait for them.
_PATIENCE = 0.25
_MEMORY = 0.9  # how long one took counts so many times the next one


class BatchWindow:
    """A step that waits a little for jobs that are about to come is one pass for all of them. If it does not, each
    conversation that drafts at the server while the others' step runs has a pass of its own in the end.

    It is waited for those that usually come in time, so nobody's drafts hold up the others for more than a quarter of
    a step.

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
        """Whether one is being prepared."""
        return self._count > 0

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """A job is prepared in this block, and handed in behind it."""
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
        """Until none is prepared any more; says whether there was one to wait for.

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
