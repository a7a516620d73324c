"""Drafters of several conversations whose steps are computed together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.moa import Steps
from moa_runtime.session.tree import DraftTree


class BatchedBackend(Backend):
    """A device half for several sequences at once."""

    @abstractmethod
    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        """Run :meth:`moa_runtime.backends.base.Backend.step` on each of the inputs, which have at least one query each;
        results are those of single steps but for rounding."""

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        return self.steps([inputs])[0]


def draft_together(backend: BatchedBackend, drafts: Sequence[Steps[DraftTree]]) -> list[DraftTree | Exception]:
    """Finish several drafts, whose steps run as one as long as they last; a failing one does not affect the others."""
    ended: dict[int, DraftTree | Exception] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(drafts)))
    while results:
        waiting: dict[int, StepInputs] = {}
        for number, result in results.items():
            if isinstance(result, Exception):
                ended[number] = result
                continue
            try:
                waiting[number] = drafts[number].send(result)
            except StopIteration as end:
                ended[number] = end.value
            except Exception as error:
                ended[number] = error
        results = dict(zip(waiting, _results(backend, list(waiting.values())), strict=True))
    return [ended[number] for number in range(len(drafts))]


def _results(backend: BatchedBackend, inputs: list[StepInputs]) -> list[StepResult | Exception]:
    if not inputs:
        return []
    try:
        return list(backend.steps(inputs))
    except Exception as error:
        if len(inputs) == 1:
            return [error]
        return [result for each in inputs for result in _results(backend, [each])]  # to isolate the failing one
