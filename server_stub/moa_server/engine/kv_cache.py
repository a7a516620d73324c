"""KV caches: keys and values of each sequence, and last hidden states if memory rows need them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moa_runtime.tokens import common_length

#: Tokens of a block; the capacity of every cache is a multiple of it.
BLOCK = 64


@dataclass(frozen=True)
class KVCacheShape:
    """Layout of the KV caches of a target.

    Attributes:
        blocks: whether tokens lie in blocks of :data:`BLOCK`, head after head in each; otherwise in one block as long
            as the cache.
        last_size: size of the last hidden states; 0 if they are not kept.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    blocks: bool
    last_size: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return (2 * self.layers * self.kv_heads * self.head_dim + self.last_size) * self.dtype.itemsize


class KVCache:
    """Keys, after RoPE, and values of up to ``capacity`` tokens. A token's index in it is its *slot*.

    Attributes:
        keys, values: ``[layers, blocks, kv_heads, block, head_dim]`` each. Slots never written hold zeros, so
            products with them are zeros. In a cache of blocks the keys lie dimension by dimension, as the products of
            queries with them want it.
        last: ``[capacity, last_size]``.
    """

    def __init__(self, shape: KVCacheShape, capacity: int) -> None:
        self.shape, self.capacity = shape, rounded_up(capacity)
        self.block = BLOCK if shape.blocks else self.capacity
        outer, rows = (shape.layers, self.capacity // self.block, shape.kv_heads), (self.block, shape.head_dim)
        self.values = _zeros(shape, *outer, *rows)
        self.keys = _zeros(shape, *outer, *rows[::-1]).mT if shape.blocks else _zeros(shape, *outer, *rows)
        self.last = _zeros(shape, self.capacity, shape.last_size)
        self._views: tuple[int, list[tuple[Tensor, Tensor]]] = (0, [])

    def resized(self, capacity: int, used: int) -> KVCache:
        """Make another cache with the first ``used`` tokens of this one."""
        other = KVCache(self.shape, capacity)
        other.last[:used] = self.last[:used]
        for block, _, part in self.segments(0, used):
            held = part.stop - part.start
            other.keys[:, block, :, :held] = self.keys[:, block, :, :held]
            other.values[:, block, :, :held] = self.values[:, block, :, :held]
        return other

    def segments(self, start: int, count: int) -> Iterator[tuple[int, int, slice]]:
        """Locate ``count`` tokens from the slot ``start`` on: block, first offset in it, and range of the tokens."""
        done = 0
        while done < count:
            block, place = divmod(start + done, self.block)
            size = min(count - done, self.block - place)
            yield block, place, slice(done, done + size)
            done += size

    def views(self, layer: int, blocks: int) -> tuple[Tensor, Tensor]:
        """The first blocks of a layer: keys ``[blocks * kv_heads, head_dim, block]``, and values transposed to them."""
        if self._views[0] != blocks:  # the same for dozens of steps
            keys, values = (half[:, :blocks].flatten(1, 2) for half in (self.keys, self.values))
            self._views = (blocks, list(zip(keys.transpose(-2, -1), values, strict=True)))
        return self._views[1][layer]

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """``[n, layers, 2 * kv_heads * head_dim]`` of the slots ``start`` to ``stop``: all keys, then all values."""
        halves = []
        for half in (self.keys, self.values):
            parts = [half.new_empty(0, len(layers), self.shape.kv_heads, self.shape.head_dim)]
            for block, place, part in self.segments(start, stop - start):
                own = half[list(layers), block, :, place : place + part.stop - part.start]
                parts.append(own.movedim(2, 0))
            halves.append(torch.cat(parts).flatten(2))
        return torch.cat(halves, -1)

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Move the tokens with the ascending indices ``path``, counted from slot ``start``, to ``start``."""
        if list(path) == list(range(len(path))):  # a chain stays where it lies
            return
        slots = start + torch.tensor(path, device=self.last.device)
        for half in (self.keys, self.values):
            taken = half[:, slots // self.block, :, slots % self.block]  # [n, layers, kv_heads, head_dim]
            for block, place, part in self.segments(start, len(path)):
                half[:, block, :, place : place + part.stop - part.start] = taken[part].movedim(0, 2)
        self.last[start : start + len(path)] = self.last[slots]


def rounded_up(tokens: int, multiple: int = BLOCK) -> int:
    """``rounded_up(65)`` is 128."""
    return -(-tokens // multiple) * multiple


def _zeros(like: KVCacheShape, *size: int) -> Tensor:
    """Allocate zeros in the cache's type, on its device; on a CPU as pages that the system maps on first use.

    The cache of a long prompt is hundreds of megabytes: writing them at once would delay a step, as would huge pages,
    one of which holds all keys of a layer.
    """
    wanted = math.prod(size) * like.dtype.itemsize
    if like.device.type != "cpu" or wanted < mmap.PAGESIZE:
        return torch.zeros(size, dtype=like.dtype, device=like.device)
    pages = mmap.mmap(-1, wanted)  # begins at a page, so results do not depend on where it lies
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(size)


#: Tokens of a new cache beyond those needed at once.
_SLACK = 64


@dataclass
class SequenceState:
    """One sequence: ``tokens`` are processed, their keys and values in the first slots of ``cache``."""

    tokens: list[int] = field(default_factory=list)
    cache: KVCache | None = None

    @property
    def capacity(self) -> int:
        """Tokens of the cache."""
        return 0 if self.cache is None else self.cache.capacity


class SequenceCaches:
    """Sequences with their caches, by the caller's numbers, the least recently used first.

    Methods called during a step run in the engine's thread; :meth:`release` and :meth:`agreed` may come from another.

    Args:
        bound: most tokens of all caches together; a multiple of 64.
    """

    def __init__(self, shape: KVCacheShape, bound: int) -> None:
        self._shape, self._bound = shape, bound
        self._states: dict[int, SequenceState] = {}

    @property
    def tokens_taken(self) -> int:
        """Capacity of all caches, in tokens."""
        return sum(state.capacity for state in tuple(self._states.values()))

    def release(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._states.clear()

    def agreed(self, number: int, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of ``prefix`` the sequence holds."""
        state = self._states.get(number)
        return 0 if state is None else common_length(state.tokens, prefix)

    def opened(self, number: int, prefix: Sequence[int]) -> SequenceState:
        """Return the state of a sequence, mark it most recently used, and cut it to agree with ``prefix``."""
        state = self._states.pop(number, None) or SequenceState()
        self._states[number] = state
        agreed = common_length(state.tokens, prefix)
        if agreed < len(prefix):
            del state.tokens[agreed:]
        return state

    def need(self, number: int, tokens: int) -> int:
        """Return the share of the bound that the cache of a sequence takes once it can hold ``tokens``."""
        state = self._states.get(number)
        return max(rounded_up(tokens), 0 if state is None else state.capacity)

    def allocate(self, tokens: Mapping[int, int]) -> None:
        """Give each sequence a cache for its number of tokens; evict others if memory is short. Together they
        :meth:`need` at most the bound."""
        reserved = sum(self.need(number, count) for number, count in tokens.items())
        for number, count in tokens.items():
            state = self._states[number]
            cache, least = state.cache, rounded_up(count)
            if least <= state.capacity:
                continue
            wanted = least + _SLACK if cache is None else max(least, rounded_up(cache.capacity + cache.capacity // 4))
            reserved -= least
            evictable = {key: other for key, other in tuple(self._states.items()) if key not in tokens}
            free = self._bound - reserved - sum(other.capacity for other in evictable.values())
            for key, other in evictable.items():
                if free >= wanted:
                    break
                free += other.capacity
                self.release(key)
            size = min(wanted, free)
            state.cache = KVCache(self._shape, size) if cache is None else cache.resized(size, len(state.tokens))
            reserved += state.capacity
