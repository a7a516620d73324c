"""A stateful Core ML model behind the stateless contract of backends, so that it can be compared with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from moa_export.targets.coreml_program import EXTEND_SIZE, ROWS_SIZE, STEP_SIZES
from moa_runtime.backends.base import Backend, Float32, StepInputs, StepResult
from moa_runtime.backends.coreml import (
    Array,
    additive_mask,
    check_capacity,
    heads_first,
    padded,
    rows_first,
)


class StatefulModel(Protocol):
    """A model with several functions and one set of states."""

    def call(self, function: str, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a function, by name; it reads and changes the states."""

    def read_state(self, name: str) -> Array:
        """A whole state."""

    def write_state(self, name: str, value: Float32) -> None:
        """Replace a whole state."""


class StatefulBackend(Backend):
    """A model that keeps its caches in states.

    It remembers what the states hold. Where the caller's cache is shorter, what lies behind it counts as free;
    where memory rows differ, they are written again from the first that does. A cache that the model did not
    compute is written to the states. Tokens before the first query are only appended, in larger pieces.

    Args:
        model: its states zero.
        shapes: of the states, and of the inputs and outputs of a step function, by name.
    """

    def __init__(self, model: StatefulModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        _, kv_heads, self._capacity, head_dim = shapes["self_keys"]
        self._model, self._top_k, self._kv_shape = model, shapes["top_tokens"][1], (kv_heads, head_dim)
        self._own = _Mirror(self._capacity, self._kv_shape)
        self._memory = _Mirror(self._capacity, self._kv_shape)

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> int:
        return self._capacity

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`.

        Raises:
            MoaError: more positions than the model holds.
        """
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        held, count, rows = len(inputs.self_keys), len(tokens), len(inputs.memory_keys)
        check_capacity(self._capacity, held + count, rows, int(positions.max()) + 1)
        self._restore(inputs.self_keys, inputs.self_values)
        self._remember(inputs.memory_keys, inputs.memory_values)
        memory_mask = additive_mask(np.arange(self._capacity)[None] < rows)
        top_tokens = np.zeros((count, self._top_k), np.int64)
        top_logprobs = np.zeros((count, self._top_k), np.float32)
        for name, size, start, stop in self._pieces(held, count, int(queries.min())):
            given: dict[str, Array] = {
                "tokens": padded(tokens[start:stop], size),
                "positions": padded(positions[start:stop], size),
                "slot": np.array([held + start], np.int32),
            }
            if name == "step":
                allowed = np.zeros((size, self._capacity), np.bool_)
                allowed[: stop - start, : held + stop] = inputs.self_mask[start:stop, : held + stop]
                given.update(self_mask=additive_mask(allowed), memory_mask=memory_mask)
            outputs = self._model.call(f"{name}_{size}", given)
            if name == "step":
                top_tokens[start:stop] = outputs["top_tokens"][: stop - start]
                top_logprobs[start:stop] = outputs["top_logprobs"][: stop - start]
        keys, values = (
            rows_first(self._model.read_state(name)[:, :, held : held + count]) for name in ("self_keys", "self_values")
        )
        self._own.write(held, keys, values)
        return StepResult(top_tokens[queries], top_logprobs[queries], keys, values)

    def _pieces(self, held: int, count: int, unqueried: int) -> Iterator[tuple[str, int, int, int]]:
        """The calls that feed ``count`` tokens behind ``held`` cached ones: ``extend`` or ``step``, its size, the
        first token and the one after the last. A call needs room for its whole size."""
        start = 0
        while start < count:
            room = self._capacity - held - start
            if start < unqueried and room >= EXTEND_SIZE:
                name, size, limit = "extend", EXTEND_SIZE, unqueried
            else:
                small, large = STEP_SIZES
                size = small if start + small == count or room < large else large
                name, limit = "step", count
            stop = min(start + size, limit)
            yield name, size, start, stop
            start = stop

    def _restore(self, keys: Float32, values: Float32) -> None:
        """Make the self-attention states begin with these entries, which the model need not have computed."""
        known = self._own.common_length(keys, values)
        if known < len(keys):
            self._own.write(known, keys[known:], values[known:])
            self._model.write_state("self_keys", np.ascontiguousarray(heads_first(self._own.keys)))
            self._model.write_state("self_values", np.ascontiguousarray(heads_first(self._own.values)))

    def _remember(self, keys: Float32, values: Float32) -> None:
        """Make the memory states begin with these rows."""
        start = self._memory.common_length(keys, values)
        while start < len(keys):
            # Behind the last full piece of room, some rows are written again.
            slot = min(start, self._capacity - ROWS_SIZE)
            piece = slice(slot, min(slot + ROWS_SIZE, len(keys)))
            self._model.call(
                f"remember_{ROWS_SIZE}",
                {
                    "new_keys": _filled(keys[piece]),
                    "new_values": _filled(values[piece]),
                    "slot": np.array([slot], np.int32),
                },
            )
            self._memory.write(slot, keys[piece], values[piece])
            start = piece.stop


class _Mirror:
    """What the states of one cache hold at positions ``0..length-1``.

    Args:
        capacity: of the states.
        kv_shape: ``(kv_heads, head_dim)``.
    """

    def __init__(self, capacity: int, kv_shape: tuple[int, int]) -> None:
        self.keys, self.values = (np.zeros((capacity, *kv_shape), np.float32) for _ in range(2))
        self._length = 0

    def common_length(self, keys: Float32, values: Float32) -> int:
        """How many of these rows, from the first on, the states hold already."""
        shared = min(self._length, len(keys))
        same = (self.keys[:shared] == keys[:shared]) & (self.values[:shared] == values[:shared])
        differing = np.flatnonzero(~same.all(axis=(1, 2)))
        return int(differing[0]) if differing.size else shared

    def write(self, start: int, keys: Float32, values: Float32) -> None:
        """Rows were written at ``start``; what lies behind them is no longer known."""
        self._length = start + len(keys)
        self.keys[start : self._length] = keys
        self.values[start : self._length] = values


def _filled(rows: Float32) -> Float32:
    """``[n, kv_heads, head_dim]``, at most as many as one call takes -> heads first, zeros added."""
    _, kv_heads, head_dim = rows.shape
    whole = np.zeros((1, kv_heads, ROWS_SIZE, head_dim), np.float32)
    whole[:, :, : len(rows)] = heads_first(rows)
    return whole
