"""Who may use the target next: one worker thread, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Scheduler:
    """Runs engine calls one after the other off the event loop.

    A conversation has one call waiting at most, for its next frame is taken only after the last
    verdict. So first come, first served is also fair: nobody waits for more than one call of each other.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "target")

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result; what it raises is raised here."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, call)

    def close(self) -> None:
        """Wait for the call under way; forget the others."""
        self._worker.shutdown(cancel_futures=True)
