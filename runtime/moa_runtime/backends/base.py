"""The contract of every backend: one stateless step of the device half."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moa_runtime.errors import MoaError
from moa_runtime.options import MOST_THREADS

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

#: Inputs that a graph lacks if it reads tokens alone.
MEMORY_INPUTS = ("memory_keys", "memory_values")


def array_of(dtype: str, *shape: str) -> Mapping[str, Any]:
    """Return an array's part of a graph's signature (see :mod:`moa_drafter.device_module`)."""
    return {"dtype": dtype, "shape": shape}


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step. The fields are the inputs of the graph by name, in order, with dtype and shape.

    Sizes: ``T`` new tokens, ``Q`` queries among them, ``S >= 0`` cached tokens, ``M`` memory rows; ``H`` heads of ``D``
    numbers in a cache entry (:attr:`Backend.kv_shape`), ``R`` heads in a row (:attr:`Backend.row_shape`).

    Attributes:
        tokens: ids of the target's vocabulary.
        positions: of the tokens, absolute.
        queries: indices of the tokens whose next token is wanted.
        self_keys, self_values: cache entries of earlier tokens, from position 0 on.
        self_mask: true where a token attends, cached tokens first, then the new ones, itself included.
        memory_keys, memory_values: memory rows of positions ``0..M-1``, for every query; with
            :attr:`Backend.needs_a_row`, ``M >= 1``.
    """

    tokens: Int64 = field(metadata=array_of("int64", "T"))
    positions: Int64 = field(metadata=array_of("int64", "T"))
    queries: Int64 = field(metadata=array_of("int64", "Q"))
    self_keys: Float32 = field(metadata=array_of("float32", "S", "H", "D"))
    self_values: Float32 = field(metadata=array_of("float32", "S", "H", "D"))
    self_mask: Bool = field(metadata=array_of("bool", "T", "S+T"))
    memory_keys: Float32 = field(metadata=array_of("float32", "M", "R", "D"))
    memory_values: Float32 = field(metadata=array_of("float32", "M", "R", "D"))

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Int64,
        cache: tuple[Float32, Float32],
        memory: tuple[Float32, Float32],
        *,
        asked: int = 1,
    ) -> StepInputs:
        """Make the step of tokens in a row that follow the cached ones.

        Args:
            cache: ``self_keys`` and ``self_values``.
            memory: ``memory_keys`` and ``memory_values``.
            asked: number of queries, the last tokens.
        """
        held, new = len(cache[0]), len(tokens)
        return cls(
            np.asarray(tokens, np.int64),
            np.arange(held, held + new, dtype=np.int64),
            np.arange(new - asked, new, dtype=np.int64),
            *cache,
            np.tri(new, held + new, held, dtype=np.bool_),
            *memory,
        )

    def by_name(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by the names of the graph's inputs."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def of_tokens(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of a graph that reads tokens alone."""
        return {name: array for name, array in self.by_name().items() if name not in MEMORY_INPUTS}


@dataclass(frozen=True)
class StepResult:
    """Outputs of one step. The fields are the outputs of the graph by name, in order; for the sizes see
    :class:`StepInputs`, ``K`` is :attr:`Backend.top_k`.

    Attributes:
        top_tokens: the most probable next tokens of each query in the target's vocabulary, best first.
        top_logprobs: their log-probabilities over the draft vocabulary (nats).
        keys, values: cache entries of the input tokens.
    """

    top_tokens: Int64 = field(metadata=array_of("int64", "Q", "K"))
    top_logprobs: Float32 = field(metadata=array_of("float32", "Q", "K"))
    keys: Float32 = field(metadata=array_of("float32", "T", "H", "D"))
    values: Float32 = field(metadata=array_of("float32", "T", "H", "D"))


class Backend(Protocol):
    """The device half, compiled. Caches stay with the caller, in an order in which the first entries of a preallocated
    cache reach the engine without a copy.

    Attributes:
        kv_shape: ``(kv_heads, head_dim)`` of a cache entry. Heads come layer by layer: the self-attention, then the
            target's last layers, if the device half ends with some.
        max_positions: positions, and memory rows, that a step can hold; None for any number.
        needs_a_row: whether a step needs a memory row: it gets one of zeros if there is none.
        entries_from_rows: whether the cache entry of a token with a row is made from rows, so that it is computed again
            when rows before it come. Entries of tokens without a row may depend on all rows in any case.
        heads_first: whether entries should lie in memory as ``[H, capacity, D]``, the cached ones
            first; then a step writes the new ones after them. Otherwise position after position.
        writer: field of a manifest with the offline writer of the same engine.
    """

    top_k: int
    kv_shape: tuple[int, int]
    max_positions: int | None = None
    needs_a_row: bool = True
    entries_from_rows: bool = False
    heads_first: bool = False
    writer: str = "writer"

    @property
    def row_shape(self) -> tuple[int, int]:
        """``(heads, head_dim)`` of a memory row's keys, and of its values: those of a cache entry.

        Heads of the cross-attention come first, then those of the target's last layers.
        """
        return self.kv_shape

    @abstractmethod
    def step(self, inputs: StepInputs) -> StepResult:
        """Run the device half; ``inputs`` are left as they are."""


def check_threads(threads: int) -> None:
    """Raise MoaError for less than one thread, or more than any processor has."""
    if not 1 <= threads <= MOST_THREADS:
        raise MoaError(f"threads must be between 1 and {MOST_THREADS}, not {threads}", code="out_of_range")
