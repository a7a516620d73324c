"""Batches the drafting steps of concurrent threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from moa_runtime.backends.base import Backend, StepInputs, StepResult

#: Runs the device half on several inputs; results in their order.
RunSteps = Callable[[Sequence[StepInputs]], list[StepResult]]
#: A step that a thread waits for.
_Asked = tuple[StepInputs, "Future[StepResult]"]


class BatchedBackend(Backend):
    """A backend for threads that draft at the same time, each for a conversation of its own.

    A thread drafts inside :meth:`drafting`. Its step waits until all other drafting threads wait for a step too or
    have left; then the steps of all run as one batch, in the backend's own thread. There is no timeout: a step waits
    only for threads that are computing, and a thread that leaves delays no other. The next batch gathers meanwhile.

    Args:
        top_k, kv_shape: see :class:`moa_runtime.backends.base.Backend`.
    """

    def __init__(self, run: RunSteps, *, top_k: int, kv_shape: tuple[int, int]) -> None:
        self._run, self.top_k, self.kv_shape = run, top_k, kv_shape
        self._lock = threading.Lock()
        self._drafting = 0  # threads inside of drafting()
        self._waiting: list[_Asked] = []
        self._running = False
        # One thread for all batches: libraries keep threads and code of their own for each that calls them.
        self._runner = ThreadPoolExecutor(1, "drafter")

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """Mark the calling thread as drafting: steps of others wait for its steps."""
        with self._lock:
            self._drafting += 1
        try:
            yield
        finally:
            with self._lock:
                self._drafting -= 1
                self._start_batch()  # the others may have waited for this thread alone

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`; only inside of :meth:`drafting`.

        Raises:
            Exception: from the device half on these inputs; failures of other inputs have no effect here.
        """
        result: Future[StepResult] = Future()
        with self._lock:
            self._waiting.append((inputs, result))
            self._start_batch()
        return result.result()

    def close(self) -> None:
        """Stop: no thread drafts any more."""
        self._runner.shutdown()

    def _start_batch(self) -> None:
        """Run the waiting steps if no thread is still computing; the lock is held."""
        if self._waiting and not self._running and len(self._waiting) == self._drafting:
            batch, self._waiting, self._running = self._waiting, [], True
            self._runner.submit(self._run_batch, batch)

    def _run_batch(self, batch: Sequence[_Asked]) -> None:
        answers = self._answers(batch)
        with self._lock:
            self._running = False
            for (_, result), answer in zip(batch, answers, strict=True):
                if isinstance(answer, BaseException):
                    result.set_exception(answer)
                else:
                    result.set_result(answer)
            self._start_batch()

    def _answers(self, batch: Sequence[_Asked]) -> list[StepResult | BaseException]:
        try:
            return list(self._run([inputs for inputs, _ in batch]))
        except BaseException as error:
            if len(batch) == 1:
                return [error]
            return [answer for asked in batch for answer in self._answers([asked])]  # to isolate the failing one
