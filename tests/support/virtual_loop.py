"""An event loop whose clock jumps when nothing is left to do: waiting takes no time, and runs repeat exactly."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class StuckError(Exception):
    """Everything waits, and no timer is set: nothing would ever happen again."""


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Instead of waiting it moves the clock on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: what belongs into a thread is run at once, and nothing from outside wakes it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-6
        #: What callbacks and tasks left behind.
        self.lost: list[str] = []
        self.set_exception_handler(lambda loop, context: self.lost.append(str(context)))

    def time(self) -> float:
        return self._jumping.now

    def jump(self, seconds: float) -> None:
        """The clock jumps ahead, as after a machine's sleep."""
        self._jumping.now += seconds

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(future.set_exception, error)
        else:
            self.call_soon(lambda: future.done() or future.set_result(result))
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """There is none."""


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on a loop of its own, ``time.monotonic`` included. It may leave no tasks or exceptions."""
    loop = VirtualLoop()
    try:
        with mock.patch.object(time, "monotonic", loop.time):
            asyncio.set_event_loop(loop)
            result = loop.run_until_complete(main(loop))
            left = [repr(task) for task in asyncio.all_tasks(loop)]
            assert not left, f"tasks are left: {left}"
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        with contextlib.suppress(StuckError), mock.patch.object(time, "monotonic", loop.time):
            for task in (after_failure := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(_gathered(after_failure))
        asyncio.set_event_loop(None)
        loop.close()
    assert not loop.lost, f"exceptions are lost: {loop.lost}"
    return result


async def _gathered(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
