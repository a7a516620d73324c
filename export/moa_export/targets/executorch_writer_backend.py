"""The offline writer on ExecuTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, Float32, Int64, StepInputs, StepResult
from moa_runtime.backends.executorch import load_program
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TargetEntry

#: Added to scores of masked positions, see :mod:`moa_runtime.backends.executorch`.
_HIDDEN = np.float32(-1e4)


class ExecutorchWriter(Backend):
    """Run the program of :mod:`moa_export.targets.executorch_writer`, whose layers have caches of their own.

    Args:
        graph: the ``.pte`` file.
        entry: of the bundle's manifest.
        threads: see :func:`moa_runtime.backends.executorch.load_program`, also for what is raised.
    """

    needs_a_row = False
    max_positions: int

    def __init__(self, graph: Path, entry: TargetEntry, *, threads: int = 2) -> None:
        self._method = load_program(graph, threads=threads).load_method("step")
        caches = [spec for spec in entry.inputs if spec.name.startswith("self_keys.")]
        self._heads = [int(spec.shape[1]) for spec in caches]
        self.kv_shape = sum(self._heads), int(caches[0].shape[2])
        self.top_k = int(entry.outputs[0].shape[1])
        self.max_positions = self._most_cached = entry.details["most"]["S"]
        self._most_tokens, self._most_queries = entry.details["most"]["T"], entry.details["most"]["Q"]
        self._window: int | None = entry.details["window"]

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Raises MoaError if they exceed ``max_positions``."""
        tokens, queries, held = inputs.tokens, inputs.queries, len(inputs.self_keys)
        if held + len(tokens) > self.max_positions:
            text = f"{held + len(tokens)} positions are too many: the exported program holds {self.max_positions}"
            raise MoaError(text, code="context_full")
        keys = np.concatenate((inputs.self_keys, np.zeros((len(tokens), *self.kv_shape), np.float32)))
        values = np.concatenate((inputs.self_values, np.zeros_like(keys[held:])))
        top_tokens = np.empty((len(queries), self.top_k), np.int64)
        top_logprobs = np.empty((len(queries), self.top_k), np.float32)
        for start in range(0, len(tokens), self._most_tokens):
            stop = min(start + self._most_tokens, len(tokens))
            asked = np.flatnonzero((queries >= start) & (queries < stop))
            for at in range(0, max(len(asked), 1), self._most_queries):
                some = asked[at : at + self._most_queries]
                # A program has at least one query and one cached entry.
                where = queries[some] - start if len(some) else np.zeros(1, np.int64)
                best, logprobs, *entries = self._run(
                    inputs, start, stop, where, keys[: held + start], values[: held + start]
                )
                if len(some):
                    top_tokens[some], top_logprobs[some] = best, logprobs
            half = len(self._heads)
            keys[held + start : held + stop] = np.concatenate(entries[:half], axis=1)
            values[held + start : held + stop] = np.concatenate(entries[half:], axis=1)
        return StepResult(top_tokens, top_logprobs, keys[held:], values[held:])

    def _run(
        self, inputs: StepInputs, start: int, stop: int, queries: Int64, keys: Float32, values: Float32
    ) -> tuple[NDArray[Any], ...]:
        cached, positions = len(keys), inputs.positions
        seen = inputs.self_mask[start:stop, : cached + stop - start]
        masks = [seen[:, :cached], seen[:, cached:]]
        if self._window is not None:
            every = np.concatenate((np.arange(len(inputs.self_keys)), positions))[: cached + stop - start]
            near = seen & (positions[start:stop, None] - every < self._window)
            masks += [near[:, :cached], near[:, cached:]]
        if not cached:
            keys = values = np.zeros((1, *self.kv_shape), np.float32)
            masks[0::2] = [np.zeros((stop - start, 1), np.bool_)] * (len(masks) // 2)
        added = [np.where(mask, np.float32(0), _HIDDEN) for mask in masks]
        ends = np.cumsum(self._heads)[:-1]
        caches = [*np.split(keys, ends, axis=1), *np.split(values, ends, axis=1)]
        arrays = inputs.tokens[start:stop], positions[start:stop], queries, *added, *caches
        given = [torch.from_numpy(np.require(array, requirements=("C", "W"))) for array in arrays]
        return tuple(output.numpy() for output in self._method.execute(given))
