"""An offline writer on ExecuTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_runtime.backends.base import Backend, Float32, Int64, StepInputs, StepResult
from moa_runtime.backends.executorch import HIDDEN, check_room, execute, load_method, load_program
from moa_runtime.manifest import TargetEntry


class ExecutorchWriter(Backend):
    """Run a bundle's program ``executorch_writer``, whose layers have caches of their own. Its one method takes a
    bounded number of tokens and of queries; more are fed in parts.

    Args:
        graph: the ``.pte`` file.
        entry: of the bundle's manifest.
        threads: see :func:`moa_runtime.backends.executorch.load_program`, also for what is raised.
    """

    needs_a_row = False
    max_positions: int

    def __init__(self, graph: Path, entry: TargetEntry, *, threads: int = 2) -> None:
        self._method = load_method(load_program(graph, threads=threads), "step", graph)
        #: Heads of each layer.
        self._heads = [int(spec.shape[1]) for spec in entry.inputs if spec.name.startswith("self_keys.")]
        self.kv_shape, self.top_k = entry.kv_shape, entry.top_k
        most = entry.details["most"]
        self._most_tokens, self._most_queries, self.max_positions = int(most["T"]), int(most["Q"]), int(most["S"])
        self._window: int | None = entry.details["window"]

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Raises MoaError if they exceed ``max_positions``."""
        tokens, queries, held = inputs.tokens, inputs.queries, len(inputs.self_keys)
        check_room(held + len(tokens), self.max_positions)
        keys, values = (
            np.concatenate((part, np.zeros((len(tokens), *self.kv_shape), np.float32)))
            for part in (inputs.self_keys, inputs.self_values)
        )
        top_tokens = np.empty((len(queries), self.top_k), np.int64)
        top_logprobs = np.empty((len(queries), self.top_k), np.float32)
        for start in range(0, len(tokens), self._most_tokens):
            stop = min(start + self._most_tokens, len(tokens))
            asked = np.flatnonzero((queries >= start) & (queries < stop))
            for at in range(0, max(len(asked), 1), self._most_queries):
                some = asked[at : at + self._most_queries]
                # A program has at least one query.
                where = queries[some] - start if len(some) else np.zeros(1, np.int64)
                cached = keys[: held + start], values[: held + start]
                best, logprobs, new_keys, new_values = self._run(inputs, start, stop, where, *cached)
                if len(some):
                    top_tokens[some], top_logprobs[some] = best, logprobs
            keys[held + start : held + stop], values[held + start : held + stop] = new_keys, new_values
        return StepResult(top_tokens, top_logprobs, keys[held:], values[held:])

    def _run(
        self, inputs: StepInputs, start: int, stop: int, queries: Int64, keys: Float32, values: Float32
    ) -> tuple[Int64, Float32, Float32, Float32]:
        """Run the tokens ``start`` to ``stop`` after the entries ``keys``, ``values [S, H, D]`` of all before.

        Args:
            queries: ``[Q]``, counted from ``start``.

        Returns:
            candidates and their log-probabilities ``[Q, K]``, and the tokens' entries ``[T, H, D]``.
        """
        cached, positions = len(keys), inputs.positions
        seen = inputs.self_mask[start:stop, : cached + stop - start]
        masks = [seen[:, :cached], seen[:, cached:]]
        if self._window is not None:
            every = np.concatenate((np.arange(len(inputs.self_keys)), positions))[: cached + stop - start]
            near = seen & (positions[start:stop, None] - every < self._window)
            masks += [near[:, :cached], near[:, cached:]]
        if not cached:  # a program has at least one cached entry
            keys = values = np.zeros((1, *self.kv_shape), np.float32)
            masks[0::2] = [np.zeros((stop - start, 1), np.bool_)] * (len(masks) // 2)
        added = [np.where(mask, np.float32(0), HIDDEN) for mask in masks]
        ends = np.cumsum(self._heads)[:-1]
        caches = [*np.split(keys, ends, axis=1), *np.split(values, ends, axis=1)]
        given: list[NDArray[Any]] = [inputs.tokens[start:stop], positions[start:stop], queries, *added, *caches]
        best, logprobs, *entries = execute(self._method, *given)
        layers = len(self._heads)
        return best, logprobs, np.concatenate(entries[:layers], axis=1), np.concatenate(entries[layers:], axis=1)
