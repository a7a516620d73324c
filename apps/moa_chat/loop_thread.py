"""Run a chat's event loop in a second thread, so that the main thread is free for the keyboard."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from moa_runtime.errors import MoaError
from moa_runtime.events import ChatEvent

T = TypeVar("T")

_POLL_SECONDS = 0.1  # a wait without end would keep Ctrl-C from the main thread on Windows


class LoopThread:
    """Runs coroutines in the background loop.

    The runtime's ``SyncChat`` blocks while it waits for an event. Here the main thread also updates the
    status line and handles keys and Ctrl-C, which may come at any moment but must not interrupt drawing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moa-chat-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, or what it raised; Ctrl-C in the meantime cancels it."""
        future = self.submit(work)
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        try:
            while not done.wait(_POLL_SECONDS):
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain function in the loop's thread, and return its result."""
        return self.run(call_in_loop(function, *arguments))

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin the coroutine, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def follow(self, events: AsyncGenerator[ChatEvent, None]) -> RunningAnswer:
        """Take an answer's events as they come."""
        return RunningAnswer(events, self._loop)

    def close(self) -> None:
        """End the thread. Coroutines that still run in the loop are cancelled."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RunningAnswer:
    """An answer that is being written in the background loop."""

    def __init__(self, events: AsyncGenerator[ChatEvent, None], loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False  # whether all of its events were taken
        self._problem: MoaError | None = None
        self._queue: queue.SimpleQueue[ChatEvent | MoaError | None] = queue.SimpleQueue()
        self._pump: Future[None] = asyncio.run_coroutine_threadsafe(self._take(events), loop)

    def events(self, wait: float = _POLL_SECONDS) -> list[ChatEvent]:
        """Return the events that came within ``wait`` seconds. Raises MoaError if the answer cannot continue."""
        if self._problem is not None:
            raise self._problem
        taken: list[ChatEvent] = []
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=wait)
            while item is not None and not isinstance(item, MoaError):
                taken.append(item)
                item = self._queue.get_nowait()
            self._problem, self.ended = item, item is None
        if self._problem is not None and not taken:
            raise self._problem
        return taken  # a problem after these is for the next call

    def stop(self) -> None:
        """Stop the answer, and keep what is confirmed; :attr:`ended` becomes true soon after."""
        self._pump.cancel()

    async def _take(self, events: AsyncGenerator[ChatEvent, None]) -> None:
        try:
            async for event in events:
                self._queue.put(event)
        except Exception as error:  # a defect, too: else the answer would seem to have ended
            failed = error if isinstance(error, MoaError) else MoaError(f"the answer failed: {error!r}", code="defect")
            self._queue.put(failed)
        finally:
            # Closing the generator is what tells the verifier that the answer was stopped.
            await events.aclose()
            self._queue.put(None)


async def call_in_loop(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function`` in the event loop, as the runtime's methods require."""
    return function(*arguments)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
