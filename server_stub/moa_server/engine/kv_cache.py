"""KV caches of the fused pass in torch: keys and values of a sequence, and features if memory rows need them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moa_server.engine.base import Float32
from moa_server.engine.target_pass import BLOCK, LogitRows, rounded_up


@dataclass(frozen=True)
class KVCacheShape:
    """Layout of the KV caches of a target, a :class:`moa_server.engine.target_pass.CacheShape`.

    Attributes:
        feature_size: size of the features; 0 if none are kept.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    feature_size: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return (2 * self.layers * self.kv_heads * self.head_dim + self.feature_size) * self.dtype.itemsize

    def new_cache(self, capacity: int) -> KVCache:
        """Make an empty cache for at least ``capacity`` tokens."""
        return KVCache(self, capacity)


class KVCache:
    """See :class:`moa_server.engine.target_pass.Cache`.

    Attributes:
        keys, values: ``[layers, blocks, kv_heads, 64, head_dim]`` each. Slots never written hold zeros, so products
            with them are zeros. The keys of a block lie dimension by dimension, as the products of queries with them
            want it.
        features: ``[capacity, feature_size]``.
    """

    @torch.inference_mode()
    def __init__(self, shape: KVCacheShape, capacity: int) -> None:
        self.shape, self.capacity = shape, rounded_up(capacity)
        outer = shape.layers, self.capacity // BLOCK, shape.kv_heads
        self.values = zeros(shape, *outer, BLOCK, shape.head_dim)
        self.keys = zeros(shape, *outer, shape.head_dim, BLOCK).mT
        self.features = zeros(shape, self.capacity, shape.feature_size)
        self._views: tuple[int, list[tuple[Tensor, Tensor]]] = (0, [])

    @torch.inference_mode()
    def resized(self, capacity: int, used: int) -> KVCache:
        """See :meth:`moa_server.engine.target_pass.Cache.resized`."""
        other = KVCache(self.shape, capacity)
        other.features[:used] = self.features[:used]
        for block, _, part in self.segments(0, used):
            held = part.stop - part.start
            other.keys[:, block, :, :held] = self.keys[:, block, :, :held]
            other.values[:, block, :, :held] = self.values[:, block, :, :held]
        return other

    def segments(self, start: int, count: int) -> Iterator[tuple[int, int, slice]]:
        """Locate ``count`` tokens from the slot ``start`` on: block, first offset in it, and range of the tokens."""
        done = 0
        while done < count:
            block, place = divmod(start + done, BLOCK)
            size = min(count - done, BLOCK - place)
            yield block, place, slice(done, done + size)
            done += size

    def views(self, layer: int, blocks: int) -> tuple[Tensor, Tensor]:
        """The first blocks of a layer: keys ``[blocks * kv_heads, head_dim, block]``, and values transposed to them."""
        if self._views[0] != blocks:  # the same for dozens of steps
            keys, values = (half[:, :blocks].flatten(1, 2) for half in (self.keys, self.values))
            self._views = (blocks, list(zip(keys.transpose(-2, -1), values, strict=True)))
        return self._views[1][layer]

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """See :meth:`moa_server.engine.target_pass.Cache.read`."""
        halves = []
        for half in (self.keys, self.values):
            parts = [half.new_empty(0, len(layers), self.shape.kv_heads, self.shape.head_dim)]
            for block, place, part in self.segments(start, stop - start):
                own = half[list(layers), block, :, place : place + part.stop - part.start]
                parts.append(own.movedim(2, 0))
            halves.append(torch.cat(parts).flatten(2))
        return torch.cat(halves, -1)

    @torch.inference_mode()
    def keep(self, start: int, path: Sequence[int]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.keep`."""
        if list(path) == list(range(len(path))):  # a chain stays where it lies
            return
        slots = start + torch.tensor(path, device=self.features.device)
        for half in (self.keys, self.values):
            taken = half[:, slots // BLOCK, :, slots % BLOCK]  # [n, layers, kv_heads, head_dim]
            for block, place, part in self.segments(start, len(path)):
                half[:, block, :, place : place + part.stop - part.start] = taken[part].movedim(0, 2)
        self.features[start : start + len(path)] = self.features[slots]

    def resumable(self, length: int) -> int:
        """See :meth:`moa_server.engine.target_pass.Cache.resumable`."""
        return length

    def block_states(self, index: int) -> tuple[Tensor, ...]:
        """See :meth:`moa_server.engine.target_pass.Cache.block_states`."""
        return tuple(part.clone() for part in self._parts(index))

    @torch.inference_mode()
    def set_block_states(self, index: int, states: tuple[Tensor, ...]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.set_block_states`."""
        for part, given in zip(self._parts(index), states, strict=True):
            part.copy_(given)

    def _parts(self, index: int) -> tuple[Tensor, ...]:
        return self.keys[:, index], self.values[:, index], self.features[index * BLOCK : (index + 1) * BLOCK]


class Layout(Protocol):
    """Type and place of a cache."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


def zeros(like: Layout, *size: int) -> Tensor:
    """Allocate zeros in a cache's type, on its device; on a CPU as pages that the system maps on first use.

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


def fetched(logits: Tensor) -> LogitRows:
    """Return logits ``[n, vocab_size]`` as rows of numpy; from a GPU each is copied when asked for."""
    return logits.numpy() if logits.device.type == "cpu" else _DeviceRows(logits)


class _DeviceRows:
    """Rows of logits that lie on a GPU."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int, /) -> Float32:
        return self._logits[row].cpu().numpy()

    def __iter__(self) -> Iterator[Float32]:
        return (self[row] for row in range(len(self)))
