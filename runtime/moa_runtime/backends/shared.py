"""One loaded device half for several chats."""

from __future__ import annotations

import threading

from moa_runtime.backends.base import Backend, StepInputs, StepResult


class SharedBackend(Backend):
    """A backend whose steps come from several threads, and are run one after the other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()

    @property
    def top_k(self) -> int:
        return self._backend.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._backend.kv_shape

    @property
    def max_positions(self) -> int | None:
        return self._backend.max_positions

    @property
    def row_shape(self) -> tuple[int, int]:
        return self._backend.row_shape

    @property
    def needs_a_row(self) -> bool:
        return self._backend.needs_a_row

    @property
    def entries_from_rows(self) -> bool:
        return self._backend.entries_from_rows

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        with self._lock:
            return self._backend.step(inputs)
