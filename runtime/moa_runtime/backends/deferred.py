"""A graph that is loaded when it is first needed."""

from __future__ import annotations

from collections.abc import Callable

from moa_runtime.backends.base import Backend, StepInputs, StepResult


class DeferredBackend(Backend):
    """Loads with its first step: what writes offline costs neither time nor memory while nobody is offline.

    Args:
        load: called once, by the thread that takes the first step. What it loads takes no memory rows.
        top_k, kv_shape: of that.
    """

    needs_a_row = False

    def __init__(self, load: Callable[[], Backend], *, top_k: int, kv_shape: tuple[int, int]) -> None:
        self._load = load
        self._loaded: Backend | None = None
        self._top_k, self._kv_shape = top_k, kv_shape

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: it cannot be loaded.
        """
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded.step(inputs)
