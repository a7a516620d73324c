"""The contract of every backend: one stateless step of the device half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class StepResult:
    """What one step computes, for ``T`` input tokens and ``Q`` queries among them.

    Attributes:
        top_tokens: the ``top_k`` most probable next tokens in the target's vocabulary, best first, ``[Q, K]``.
        top_logprobs: their log-probabilities over the draft vocabulary (nats), ``[Q, K]``.
        keys, values: cache entries of the input tokens, ``[T, kv_heads, head_dim]``.
    """

    top_tokens: Int64
    top_logprobs: Float32
    keys: Float32
    values: Float32


class Backend(Protocol):
    """The device half, compiled. Caches stay with the caller, sequence first, so that a slice of a
    preallocated cache is contiguous and reaches the engine without a copy."""

    @property
    def top_k(self) -> int: ...

    @property
    def kv_shape(self) -> tuple[int, int]:
        """``(kv_heads, head_dim)`` of a cache entry and of a memory row.

        Heads of the self-attention (or cross-attention) come first, then those of each target layer, if the device
        half ends with some.
        """

    @property
    def max_positions(self) -> int | None:
        """How many positions, and memory rows, a step can hold; None for any number."""

    def step(
        self,
        tokens: Int64,
        positions: Int64,
        queries: Int64,
        self_keys: Float32,
        self_values: Float32,
        self_mask: NDArray[np.bool_],
        memory_keys: Float32,
        memory_values: Float32,
    ) -> StepResult:
        """Run the device half.

        Args:
            tokens, positions: ``[T]``; absolute positions.
            queries: ``[Q]``, indices into the ``T`` tokens whose next token is wanted.
            self_keys, self_values: cache of earlier tokens, ``[S, kv_heads, head_dim]``, S >= 0, from position 0 on.
            self_mask: ``[T, S + T]``, true where a token may look (cached tokens first).
            memory_keys, memory_values: memory rows of positions ``0..M-1``, ``[M, kv_heads, head_dim]``; every query
                sees all. M >= 1: where there is none, one of zeros.
        """
