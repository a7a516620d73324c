"""Paged KV cache of vLLM: sizes of its blocks, and reading keys and values of chosen tokens.

The layout of a block depends on the attention backend: heads before or after tokens, keys dimension by dimension on
CPUs, or interleaved for matrix instructions. So the layout is learnt at the start: numbers are stored through the
backend itself and located in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_drafter.config import key_value_size
from moa_drafter.target_facts import TargetFacts
from moa_server.engine.base import EngineError

#: Stores keys and values ``[n, heads, size]`` of new tokens in the slots ``[n]``, counted through all blocks.
Store = Callable[[Tensor, Tensor, Tensor], None]

#: Tokens of a block: small ones, for a rewind computes part of one again. vLLM's attention on CPUs wants multiples
#: of 32.
BLOCK = 32
#: Tokens of one draft at most: what vLLM's verification is made for.
MOST_DRAFTED = 128
#: Tokens of vLLM's context beyond a conversation's: the choice after a full one, and one more, for vLLM ends a
#: request that fills its context.
SPARE = 2
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
    def learnt(cls, cache: Tensor, store: Store, heads: int, size: int) -> PagedLayer:
        """Learn where ``store`` puts numbers. Block 0 is overwritten: vLLM does not use it.

        Raises:
            EngineError: what is stored does not come back as it was: a cache of compressed numbers, say.
        """
        count = 2 * BLOCK * heads * size
        numbers = torch.arange(count, device=cache.device).view(BLOCK, 2, heads, size)
        slots = torch.arange(BLOCK, device=cache.device)
        found, place = torch.zeros(cache[0].numel(), dtype=torch.long, device=cache.device), 1
        while place < count:
            digits = (numbers // place % _BASE).to(cache.dtype)
            store(digits[:, 0].contiguous(), digits[:, 1].contiguous(), slots)
            found += cache[0].flatten().long() * place
            place *= _BASE
        if found.sort().values.tolist() != list(range(count)):
            text = "this attention backend of vLLM stores keys and values in a form that cannot be read"
            raise EngineError(text, code="unsupported_cache")
        return cls(cache, found.argsort().view(BLOCK, 2 * heads * size))

    def read(self, blocks: Tensor, which: Tensor, offsets: Tensor) -> Tensor:
        """``[n, 2 * heads * size]`` of ``n`` tokens, each in one of the blocks (``which``) at an offset in it."""
        return self.cache[blocks].flatten(1)[which[:, None], self.places[offsets]]


class PagedFeatures:
    """Features of a sequence, which lie in the slots that its keys and values have.

    Args:
        slots: features of all slots, ``[slots, size]``.
        table: blocks of the sequence, in the order of its tokens.
    """

    def __init__(self, slots: Tensor, table: Tensor) -> None:
        self._slots, self._table = slots, table

    def __getitem__(self, tokens: slice) -> Tensor:
        positions = torch.arange(tokens.start, tokens.stop)
        places = self._table[positions // BLOCK] * BLOCK + positions % BLOCK
        return self._slots[places.to(self._slots.device)]


class PagedStates:
    """Implements what :class:`moa_server.engine.base.Span` holds.

    Args:
        layers: of the target, by number.
        table: blocks of the sequence, in the order of its tokens.
        features: of all slots, ``[slots, size]``; None if none are kept.
    """

    def __init__(self, layers: Mapping[int, PagedLayer], table: Sequence[int], features: Tensor | None = None) -> None:
        self._layers, self._table = layers, torch.tensor(table, dtype=torch.int64)
        self.features = None if features is None else PagedFeatures(features, self._table)

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """``[n, layers, 2 * heads * size]`` of the tokens ``start`` to ``stop``: all keys, then all values."""
        positions = torch.arange(start, stop)
        used, which = (positions // BLOCK).unique(return_inverse=True)
        device = self._layers[layers[0]].cache.device
        places = [part.to(device) for part in (self._table[used], which, positions % BLOCK)]
        return torch.stack([self._layers[layer].read(*places) for layer in layers], 1)


def block_bytes(target: TargetFacts, dtype: torch.dtype) -> int:
    """Return the bytes of a block, all layers together."""
    return BLOCK * key_value_size(target.config) * int(target.config.num_hidden_layers) * dtype.itemsize


def check_device(device: str) -> None:
    """Raise an EngineError if the installed vLLM computes on another device."""
    from vllm.platforms import current_platform

    if torch.device(device).type != current_platform.device_type:
        raise EngineError(
            f"vLLM as it is installed here computes on {current_platform.device_type}, not on --device {device}: "
            f"choose --device {current_platform.device_type}, or another release of vLLM",
            code="unknown_device",
        )


def check_memory(target: TargetFacts, dtype: torch.dtype, blocks: int, device: torch.device) -> None:
    """Raise an EngineError if the blocks are larger than all memory of the device."""
    size = blocks * block_bytes(target, dtype)
    own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    there = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else own
    if size > there:
        raise EngineError(
            f"caches for {blocks * BLOCK} tokens take {size / 1e9:.1f} GB, and the {device.type} has "
            f"{there / 1e9:.1f} GB: lower --cache-tokens or --max-context",
            code="out_of_memory",
        )
