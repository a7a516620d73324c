"""Keys and values of chosen tokens, out of a paged cache.

How a block is laid out is up to the attention backend: heads before tokens or behind them, keys dimension by dimension
on CPUs, or interleaved for matrix instructions. So the layout is not written down here but learnt: numbers are stored
through the backend itself, and looked up where they went. That is checked at the start, with every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_server.engine.target_settings import EngineError

#: Stores keys and values ``[n, heads, size]`` of new tokens in the slots ``[n]``, counted through all blocks.
Store = Callable[[Tensor, Tensor, Tensor], None]

#: Whole numbers below it are exact in every type that caches have.
_BASE = 128


@dataclass(frozen=True)
class PagedLayer:
    """The cache of one layer.

    Attributes:
        cache: ``[blocks, ...]``.
        places: where in a block, flattened, the numbers of its tokens lie: ``[block, 2 * heads * size]``, all keys of a
            token and then all its values.
    """

    cache: Tensor
    places: Tensor

    @classmethod
    def learnt(cls, cache: Tensor, store: Store, block: int, heads: int, size: int) -> PagedLayer:
        """Look where ``store`` puts what. Block 0 is overwritten: vLLM keeps it for nothing.

        Raises:
            EngineError: what is stored does not come back as it was: a cache of compressed numbers, say.
        """
        count = 2 * block * heads * size
        numbers = torch.arange(count, device=cache.device).view(block, 2, heads, size)
        slots = torch.arange(block, device=cache.device)
        found, place = torch.zeros(cache[0].numel(), dtype=torch.long, device=cache.device), 1
        while place < count:
            digits = (numbers // place % _BASE).to(cache.dtype)
            store(digits[:, 0].contiguous(), digits[:, 1].contiguous(), slots)
            found += cache[0].flatten().long() * place
            place *= _BASE
        if found.sort().values.tolist() != list(range(count)):
            raise EngineError("this attention backend of vLLM stores keys and values in a form that cannot be read")
        return cls(cache, found.argsort().view(block, 2 * heads * size))

    def read(self, blocks: Tensor, which: Tensor, offsets: Tensor) -> Tensor:
        """``[n, 2 * heads * size]`` of ``n`` tokens, each in one of the blocks (``which``) at an offset in it."""
        return self.cache[blocks].flatten(1)[which[:, None], self.places[offsets]]


class PagedCaches:
    """The caches of all layers."""

    def __init__(self, layers: Mapping[int, PagedLayer], block: int) -> None:
        self._layers, self._block = layers, block

    def of(self, table: Sequence[int]) -> PagedStates:
        """The states of a sequence with these blocks."""
        return PagedStates(self._layers, self._block, table)


class PagedStates:
    """Implements :class:`moa_server.engine.memory_rows.HeldStates`; last hidden states are not kept."""

    def __init__(self, layers: Mapping[int, PagedLayer], block: int, table: Sequence[int]) -> None:
        self._layers, self._block, self._table = layers, block, torch.tensor(table)
        self.last = torch.empty(0, 0)

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """``[n, layers, 2 * heads * size]`` of the tokens ``start`` to ``stop``: all keys, then all values."""
        positions = torch.arange(start, stop)
        used, which = (positions // self._block).unique(return_inverse=True)
        device = self._layers[layers[0]].cache.device
        places = [part.to(device) for part in (self._table[used], which, positions % self._block)]
        return torch.stack([self._layers[layer].read(*places) for layer in layers], 1)
