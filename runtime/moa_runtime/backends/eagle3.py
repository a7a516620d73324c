"""The backend contract for EAGLE-3 heads: bookkeeping in numpy around one compiled pass.

The cache entry of a token is the layer's key and value of the pair (token, feature of the token before), each followed
by half of the estimate that takes the feature's place for the next token if this one has no memory row. A memory row is
a token's feature, in two halves.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moa_runtime.backends.base import Backend, Bool, Float32, Int64, StepInputs, StepResult, array_of


@dataclass(frozen=True)
class Eagle3Inputs:
    """Inputs of one pass. The fields are the inputs of the graph by name, in order; sizes as in
    :class:`moa_runtime.backends.base.StepInputs`, ``H`` and ``D`` those of the layer's keys, ``F`` of a feature.

    Attributes:
        tokens, positions: of the new pairs.
        queries: indices of the pairs whose next token is wanted, at least one.
        features: of the tokens before the new ones, or estimates.
        self_keys, self_values: of earlier pairs.
        self_mask: true where a pair attends, earlier ones first, then the new ones, itself included.
    """

    tokens: Int64 = field(metadata=array_of("int64", "T"))
    positions: Int64 = field(metadata=array_of("int64", "T"))
    queries: Int64 = field(metadata=array_of("int64", "Q"))
    features: Float32 = field(metadata=array_of("float32", "T", "F"))
    self_keys: Float32 = field(metadata=array_of("float32", "S", "H", "D"))
    self_values: Float32 = field(metadata=array_of("float32", "S", "H", "D"))
    self_mask: Bool = field(metadata=array_of("bool", "T", "S+T"))


@dataclass(frozen=True)
class Eagle3Result:
    """Outputs of one pass. The fields are the outputs of the graph by name, in order.

    Attributes:
        top_tokens, top_logprobs: see :class:`moa_runtime.backends.base.StepResult`.
        keys, values: of the new pairs.
        estimates: of the queries' features.
    """

    top_tokens: Int64 = field(metadata=array_of("int64", "Q", "K"))
    top_logprobs: Float32 = field(metadata=array_of("float32", "Q", "K"))
    keys: Float32 = field(metadata=array_of("float32", "T", "H", "D"))
    values: Float32 = field(metadata=array_of("float32", "T", "H", "D"))
    estimates: Float32 = field(metadata=array_of("float32", "Q", "F"))


#: The passes of a step: yields the inputs of each, is sent its result, returns the step's result.
Passes = Generator[Eagle3Inputs, Eagle3Result, StepResult]


class Eagle3Pass(Protocol):
    """A head, compiled.

    Attributes:
        top_k: candidates per query.
        kv_shape: ``(kv_heads, head_dim)`` of its layer.
        hidden_size: numbers of a feature.
    """

    top_k: int
    kv_shape: tuple[int, int]
    hidden_size: int

    def __call__(self, inputs: Eagle3Inputs) -> Eagle3Result:
        """Compute one pass."""


class Eagle3Backend(Backend):
    """Implements :class:`moa_runtime.backends.base.Backend` with the passes of a head.

    A step is one pass if every token is the successor of one with a row, or of a cached one; a chain of tokens without
    rows takes a pass for each.
    """

    needs_a_row, entries_from_rows = False, True

    def __init__(self, compute: Eagle3Pass) -> None:
        self._compute, self.top_k = compute, compute.top_k
        self._heads, self._half = compute.kv_shape, compute.hidden_size // 2
        self._keys = compute.kv_shape[0] * compute.kv_shape[1]
        self.kv_shape = 1, self._keys + self._half

    @property
    def row_shape(self) -> tuple[int, int]:
        """See :func:`halves_of`."""
        return halves_of(2 * self._half, self._heads[0])

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        passes = self.passes(inputs)
        try:
            wanted = next(passes)
            while True:
                wanted = passes.send(self._compute(wanted))
        except StopIteration as ended:
            result: StepResult = ended.value
            return result

    def passes(self, inputs: StepInputs) -> Passes:
        """Do the same, but leave the passes to the caller, which can compute those of several steps at once."""
        tokens, positions, queries = inputs.tokens, inputs.positions, inputs.queries
        held, count, rows = len(inputs.self_keys), len(tokens), len(inputs.memory_keys)
        cached = [self._split(entries[:, 0]) for entries in (inputs.self_keys, inputs.self_values)]
        made = [np.zeros((count, self.kv_shape[1]), np.float32) for _ in cached]
        own = [self._split(entries) for entries in made]  # views
        mask, parents = _without_first(inputs.self_mask, positions, held), parents_of(inputs.self_mask, held)
        features = np.zeros((count, 2 * self._half), np.float32)
        from_row = positions <= rows
        before = positions[from_row]
        for columns, half in zip(
            np.split(features, 2, axis=1), (inputs.memory_keys, inputs.memory_values), strict=True
        ):
            # By position; zeros before the first token.
            columns[from_row] = np.concatenate((np.zeros((1, self._half), np.float32), half.reshape(rows, self._half)))[
                before
            ]
        from_cache = ~from_row & (parents < held)
        features[from_cache] = np.concatenate([half[parents[from_cache]] for _, half in cached], axis=1)
        wanted = positions >= rows  # their estimates take the place of features
        wanted[queries] = True
        top, logprobs = np.zeros((count, self.top_k), np.int64), np.zeros((count, self.top_k), np.float32)
        known, ready = np.zeros(count, np.bool_), from_row | from_cache
        while len(new := np.flatnonzero(ready & ~known)):
            asked = np.flatnonzero(wanted[new])
            if not len(asked):
                asked = np.array([len(new) - 1])
            earlier = np.flatnonzero(known)
            (keys, _), (values, _) = cached
            if len(earlier):
                keys, values = (np.concatenate((part, own[n][0][earlier])) for n, part in enumerate((keys, values)))
            columns = np.concatenate((np.arange(held), held + earlier, held + new))
            result = yield Eagle3Inputs(
                tokens[new], positions[new], asked, features[new], keys, values, mask[np.ix_(new, columns)]
            )
            at = new[asked]
            top[at], logprobs[at] = result.top_tokens, result.top_logprobs
            halves = np.split(result.estimates, 2, axis=1)
            for (entries, half), found, estimate in zip(own, (result.keys, result.values), halves, strict=True):
                entries[new], half[at] = found, estimate
            known[new] = True
            # In a chain of tokens without rows, one more.
            next_ = ~ready
            next_[next_] = known[parents[next_] - held]
            features[next_] = np.concatenate([half[parents[next_] - held] for _, half in own], axis=1)
            ready |= next_
        return StepResult(top[queries], logprobs[queries], *(entries[:, None] for entries in made))

    def _split(self, entries: Float32) -> tuple[Float32, Float32]:
        """Return views of cache entries ``[n, numbers]``: keys or values ``[n, heads, head_dim]``, halves of
        estimates."""
        heads, head_dim = self._heads
        numbers = heads * head_dim
        return entries[:, :numbers].reshape(-1, heads, head_dim), entries[:, numbers:]


def halves_of(hidden_size: int, heads: int) -> tuple[int, int]:
    """Return the shape ``(heads, size)`` of each of the two arrays of a row, half a feature; the wire scales each
    head."""
    half = hidden_size // 2
    return (heads, half // heads) if half % heads == 0 else (1, half)


def parents_of(mask: Bool, held: int) -> Int64:
    """Return the index of each new token's parent, counting ``held`` cached tokens first; any for the first token.

    Args:
        mask: ``[T, S + T]``, true for a token's ancestors, the last of them its parent, and for itself.
    """
    ancestors = mask.copy()
    ancestors[np.arange(len(mask)), held + np.arange(len(mask))] = False
    parents: Int64 = mask.shape[1] - 1 - ancestors[:, ::-1].argmax(axis=1)
    return parents


def _without_first(mask: Bool, positions: Int64, held: int) -> Bool:
    """Return the mask ``[T, S + T]`` in which the first token, which has no feature before it, is attended to by
    itself alone."""
    mask = mask.copy()
    first = np.flatnonzero(positions == 0)
    mask[:, :1] = False  # the first token, cached or new
    mask[first, held + first] = True
    return mask
