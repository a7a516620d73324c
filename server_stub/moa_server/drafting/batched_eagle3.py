"""Steps of an EAGLE-3 head for several conversations, whose passes are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moa_runtime.backends.base import StepInputs, StepResult
from moa_runtime.backends.eagle3 import Eagle3Backend, Eagle3Inputs, Eagle3Pass, Eagle3Result
from moa_server.drafting.batched_backend import BatchedBackend


class BatchedEagle3Pass(Eagle3Pass, Protocol):
    """A head that computes passes of several steps at once."""

    def together(self, passes: Sequence[Eagle3Inputs]) -> list[Eagle3Result]:
        """Return the result of each pass; but for rounding it does not depend on the others."""


class BatchedEagle3(Eagle3Backend, BatchedBackend):
    """The backend of a head for several steps at once."""

    def __init__(self, compute: BatchedEagle3Pass) -> None:
        super().__init__(compute)
        self._together = compute.together

    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """See :meth:`BatchedBackend.steps`."""
        steps, ended = [self.passes(each) for each in inputs], dict[int, StepResult]()
        waiting = {number: next(step) for number, step in enumerate(steps)}  # each has a query, so a pass
        while waiting:
            results = self._together(list(waiting.values()))
            numbers, waiting = list(waiting), {}
            for number, result in zip(numbers, results, strict=True):
                try:
                    waiting[number] = steps[number].send(result)
                except StopIteration as end:
                    ended[number] = end.value
        return [ended[number] for number in range(len(steps))]
