"""Steps that several threads ask for at about the same time, run as one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from moa_runtime.backends.base import Backend, StepInputs, StepResult

#: Runs the device half on several inputs; results in their order.
RunSteps = Callable[[Sequence[StepInputs]], list[StepResult]]


class _Asked(NamedTuple):
    """A step that a thread waits for."""

    inputs: StepInputs
    result: Future[StepResult]


class BatchedBackend(Backend):
    """A backend for threads that draft at the same time, each for a conversation of its own.

    A thread drafts inside of :meth:`drafting`. Its step waits until all others that draft wait for one too, or have
    left; then the steps of all are run, in a thread of the backend's own. So nobody waits for a clock, only for those
    who are computing, and who leaves, however it ends, holds nobody up. While a batch runs the next one gathers.

    Args:
        top_k, kv_shape: see :class:`moa_runtime.backends.base.Backend`.
    """

    def __init__(self, run: RunSteps, *, top_k: int, kv_shape: tuple[int, int]) -> None:
        self._run, self._top_k, self._kv_shape = run, top_k, kv_shape
        self._lock = threading.Lock()
        self._drafting = 0  # threads inside of drafting()
        self._waiting: list[_Asked] = []
        self._running = False
        # One thread for all batches: libraries keep threads and code of their own for each that calls them.
        self._runner = ThreadPoolExecutor(1, "drafter")

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """The calling thread drafts; others' steps wait for its steps."""
        with self._lock:
            self._drafting += 1
        try:
            yield
        finally:
            with self._lock:
                self._drafting -= 1
                self._start_batch()  # perhaps it was the one that the others waited for

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`; only inside of :meth:`drafting`.

        Raises:
            Exception: what the device half raised on these inputs; what it raises on others harms nobody else.
        """
        asked = _Asked(inputs, Future())
        with self._lock:
            self._waiting.append(asked)
            self._start_batch()
        return asked.result.result()

    def close(self) -> None:
        """Nobody drafts any more."""
        self._runner.shutdown()

    def _start_batch(self) -> None:
        """Run what is waited for, if nobody is still computing; the lock is held."""
        if self._waiting and not self._running and len(self._waiting) == self._drafting:
            batch, self._waiting, self._running = self._waiting, [], True
            self._runner.submit(self._run_batch, batch)

    def _run_batch(self, batch: Sequence[_Asked]) -> None:
        answers = self._answers(batch)
        with self._lock:
            self._running = False
            for asked, answer in zip(batch, answers, strict=True):
                if isinstance(answer, BaseException):
                    asked.result.set_exception(answer)
                else:
                    asked.result.set_result(answer)
            self._start_batch()

    def _answers(self, batch: Sequence[_Asked]) -> list[StepResult | BaseException]:
        try:
            return list(self._run([asked.inputs for asked in batch]))
        except BaseException as error:
            if len(batch) == 1:
                return [error]
            return [answer for asked in batch for answer in self._answers([asked])]  # which one cannot be done?
