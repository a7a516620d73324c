"""A backend whose answers depend on everything it is given, to check the drafter's caches with."""

from __future__ import annotations

import numpy as np

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.moa import MoaDrafter

KV = (2, 4)


class EchoBackend(Backend):
    """Cache entries carry ``(token, position)``; the next token is a hash of all that a query sees.

    It checks what a real graph cannot: positions that count on, a causal mask, caches without copies.
    """

    top_k = 1
    kv_shape = KV
    max_positions = None

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.rows: list[int] = []

    def step(self, inputs: StepInputs) -> StepResult:
        held, new, memory = len(inputs.self_keys), len(inputs.tokens), (inputs.memory_keys, inputs.memory_values)
        assert inputs.positions.tolist() == list(range(held, held + new))
        assert (inputs.self_mask == np.tri(held + new, dtype=bool)[held:]).all()
        assert inputs.self_keys[:, 0, 1].tolist() == list(range(held))
        assert all(array.flags.c_contiguous for array in inputs.by_name().values())
        assert len(memory[0]) == len(memory[1]) >= self.needs_a_row
        self.fed.append(new)
        self.rows.append(len(memory[0]))
        keys = np.zeros((new, *KV), np.float32)
        keys[:, 0, 0], keys[:, 0, 1] = inputs.tokens, inputs.positions
        everything = np.concatenate((inputs.self_keys, keys))[:, 0, 0].tolist()
        seen = (*everything[: held + int(inputs.queries[0]) + 1], *(float(rows.sum()) for rows in memory))
        best = hash(seen) % 1000
        return StepResult(np.array([[best]]), np.array([[-best / 1000]], np.float32), keys, keys + 1)


def rows(start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.arange(start, start + count, dtype=np.float32)[:, None, None] * np.ones((1, *KV), np.float32)
    return keys, keys + 0.5


def fed(drafter: MoaDrafter) -> list[int]:
    """Tokens given to the backend, step by step, since the last question."""
    backend = drafter._backend
    steps, backend.fed = backend.fed, []
    return steps
