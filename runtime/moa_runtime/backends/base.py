"""The contract of every backend: one stateless step of the device half."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


#: Inputs that a graph lacks which looks at tokens alone.
MEMORY_INPUTS = ("memory_keys", "memory_values")


def _of(dtype: str, *shape: str) -> Mapping[str, Any]:
    """What a graph's signature says of an array (see :mod:`moa_drafter.device_module`)."""
    return {"dtype": dtype, "shape": shape}


@dataclass(frozen=True)
class StepInputs:
    """What one step is given. The fields are the inputs of the graph by name, in order, with dtype and shape.

    Sizes: ``T`` new tokens, ``Q`` queries among them, ``S >= 0`` cached tokens, ``M`` memory rows; ``H`` heads of ``D``
    numbers in a cache entry (:attr:`Backend.kv_shape`), ``R`` heads in a row (:attr:`Backend.row_shape`).

    Attributes:
        tokens: ids of the target's vocabulary.
        positions: of the tokens, absolute.
        queries: indices into the ``T`` tokens whose next token is wanted.
        self_keys, self_values: cache entries of earlier tokens, from position 0 on.
        self_mask: true where a token may look, cached tokens first, then the new ones, itself included.
        memory_keys, memory_values: memory rows of positions ``0..M-1``; every query sees all. ``M >= 1`` where
            :attr:`Backend.needs_a_row`: without any there is one of zeros.
    """

    tokens: Int64 = field(metadata=_of("int64", "T"))
    positions: Int64 = field(metadata=_of("int64", "T"))
    queries: Int64 = field(metadata=_of("int64", "Q"))
    self_keys: Float32 = field(metadata=_of("float32", "S", "H", "D"))
    self_values: Float32 = field(metadata=_of("float32", "S", "H", "D"))
    self_mask: Bool = field(metadata=_of("bool", "T", "S+T"))
    memory_keys: Float32 = field(metadata=_of("float32", "M", "R", "D"))
    memory_values: Float32 = field(metadata=_of("float32", "M", "R", "D"))

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Int64,
        cache: tuple[Float32, Float32],
        memory: tuple[Float32, Float32],
        *,
        asked: int = 1,
    ) -> StepInputs:
        """Tokens that follow one another behind the cached ones.

        Args:
            cache: ``self_keys`` and ``self_values``.
            memory: ``memory_keys`` and ``memory_values``.
            asked: how many tokens are queries, the last ones.
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
        """The arrays, as they are, by the names of the graph's inputs."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def of_tokens(self) -> dict[str, NDArray[Any]]:
        """Those of a graph that looks at tokens alone."""
        return {name: array for name, array in self.by_name().items() if name not in MEMORY_INPUTS}


@dataclass(frozen=True)
class StepResult:
    """What one step computes. The fields are the outputs of the graph by name, in order; for the sizes see
    :class:`StepInputs`, ``K`` is :attr:`Backend.top_k`.

    Attributes:
        top_tokens: the most probable next tokens of each query in the target's vocabulary, best first.
        top_logprobs: their log-probabilities over the draft vocabulary (nats).
        keys, values: cache entries of the input tokens.
    """

    top_tokens: Int64 = field(metadata=_of("int64", "Q", "K"))
    top_logprobs: Float32 = field(metadata=_of("float32", "Q", "K"))
    keys: Float32 = field(metadata=_of("float32", "T", "H", "D"))
    values: Float32 = field(metadata=_of("float32", "T", "H", "D"))


class Backend(Protocol):
    """The device half, compiled. Caches stay with the caller, sequence first, so that a slice of a
    preallocated cache is contiguous and reaches the engine without a copy.

    A class that derives from it has memory rows as the Mixture of Attentions has them, unless it says otherwise.
    """

    @property
    @abstractmethod
    def top_k(self) -> int: ...

    @property
    @abstractmethod
    def kv_shape(self) -> tuple[int, int]:
        """``(kv_heads, head_dim)`` of a cache entry.

        Heads come layer by layer: the self-attention, then the target's last layers, if the device half ends with some.
        """

    @property
    @abstractmethod
    def max_positions(self) -> int | None:
        """How many positions, and memory rows, a step can hold; None for any number."""

    @property
    def row_shape(self) -> tuple[int, int]:
        """``(heads, head_dim)`` of a memory row's keys, and of its values: those of a cache entry.

        Heads of the cross-attention come first, then those of the target's last layers.
        """
        return self.kv_shape

    @property
    def needs_a_row(self) -> bool:
        """Whether a step needs a memory row, so that it is given one of zeros where there is none: yes."""
        return True

    @property
    def entries_from_rows(self) -> bool:
        """Whether the cache entry of a token with a row is made from rows, so that it is computed again when rows
        before it come: no. Entries of tokens without a row may depend on all the rows there are in any case."""
        return False

    @abstractmethod
    def step(self, inputs: StepInputs) -> StepResult:
        """Run the device half; ``inputs`` are left as they are."""
