"""The new tokens of several drafting steps, and the layers that run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from moa_drafter.device_module import by_layer, in_place
from moa_drafter.llama import DecoderLayer, KeysValues
from moa_drafter.llama import joined as appended
from moa_runtime.backends.base import StepInputs
from moa_server.drafting.packed_layer import Attend, PackedKeysValues, PackedLayer, attended


class Looking:
    """Tokens of several steps, and where they may look.

    Args:
        angles: of their positions.
        counts: how many there are of each step.
        masks: of each step, boolean ``[tokens, S + T]``.
    """

    def __init__(self, angles: tuple[Tensor, Tensor], counts: list[int], masks: Sequence[Tensor]) -> None:
        self.angles, self._counts, self._masks = angles, counts, masks

    def at(self, seen: Sequence[KeysValues], *, everywhere: bool = False) -> Attend:
        """Attention of each step's tokens to keys and values of its own, ``[n, kv_heads, head_dim]``."""
        masks = [None] * len(seen) if everywhere else self._masks

        def attend(q: Tensor) -> Tensor:
            steps = zip(q.split(self._counts), seen, masks, strict=True)
            return torch.cat(
                [attended(own[None], keys[None], values[None], mask)[0] for own, (keys, values), mask in steps]
            )

        return attend


class Batch:
    """The inputs of several steps on the target's device, and what their layers leave.

    Attributes:
        tokens: of all steps, one behind the other, ``[T]``.
        count, asked: how many of them, and how many queries, each step has.
        looking: who asks: all tokens, from :meth:`only_queries` on the queries.
        rows: of each step, memory rows by layer, the cross-attention's first.
        new: by layer, in order, keys and values of the tokens, ``[T, kv_heads, head_dim]`` each.
    """

    def __init__(
        self,
        inputs: Sequence[StepInputs],
        angles_of: Callable[[Tensor], tuple[Tensor, Tensor]],
        heads: int,
        device: torch.device,
    ) -> None:
        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        self.tokens = moved(np.concatenate([each.tokens for each in inputs]))
        self.count = [len(each.tokens) for each in inputs]
        self.asked = [len(each.queries) for each in inputs]
        firsts = np.cumsum([0, *self.count[:-1]])
        queries = np.concatenate([first + each.queries for first, each in zip(firsts, inputs, strict=True)])
        self._queries, self._own_queries = moved(queries), [moved(each.queries) for each in inputs]
        self._angles = angles_of(moved(np.concatenate([each.positions for each in inputs])))
        self._masks = [moved(each.self_mask) for each in inputs]
        self._cached = [by_layer(moved(each.self_keys), moved(each.self_values), heads) for each in inputs]
        self.rows = [by_layer(moved(each.memory_keys), moved(each.memory_values), heads) for each in inputs]
        self.looking = Looking(self._angles, self.count, self._masks)
        self.new: list[KeysValues] = []

    def only_queries(self, x: Tensor) -> Tensor:
        """The rows of ``x [T, hidden]`` that are queries; they alone look from now on."""
        cos, sin = self._angles
        masks = [mask[queries] for mask, queries in zip(self._masks, self._own_queries, strict=True)]
        self.looking = Looking((cos[self._queries], sin[self._queries]), self.asked, masks)
        return x[self._queries]

    def seen(self, keys_values: PackedKeysValues, x: Tensor, rows: int) -> list[KeysValues]:
        """What each step sees in the layer at hand: its cache, then its tokens, whose part is kept in ``new``.

        Args:
            x: ``[T, hidden]``.
            rows: which of the memory rows' layers stand in place of the first tokens; 0 for none.
        """
        own, at = keys_values(x, self._angles), len(self.new)
        self.new.append(own)
        steps = zip(self._cached, *(half.split(self.count) for half in own), strict=True)
        whole = [appended(cached[at], (keys, values)) for cached, keys, values in steps]
        return [_with_rows(rows, *each) for each in zip(self.rows, whole, strict=True)] if rows else whole


def _with_rows(at: int, rows: Sequence[KeysValues], own: KeysValues) -> KeysValues:
    """What a step attends to in the target's own layer of number ``at`` among those of its rows."""
    given = rows[0][0][0].ne(0).any()  # without any row there is one of zeros, as in the reference
    keys, values = (in_place(*halves, given) for halves in zip(rows[at], own, strict=True))
    return keys, values


class OwnLayer:
    """A decoder layer that looks at what it made of earlier tokens, and of the new ones."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self._layer, self._keys_values = PackedLayer(layer, dtype), PackedKeysValues(layer, dtype)

    def __call__(self, x: Tensor, batch: Batch, *, rows: int = 0, last: bool = False) -> Tensor:
        """``x [T, hidden]`` -> ``[T, hidden]``, or of the queries alone, ``[Q, hidden]``.

        Args:
            rows: see :meth:`Batch.seen`.
            last: no layer that follows needs the other tokens.
        """
        seen = batch.seen(self._keys_values, x, rows)
        if last:
            x = batch.only_queries(x)
        return self._layer(x, batch.looking.angles, batch.looking.at(seen))
