"""Caches of keys and values in numpy, laid out for attention in onnxruntime."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from moa_server.engine.base import Float32
from moa_server.engine.target_pass import BLOCK, rounded_up

#: Ranges of blocks that a cache keeps handles of: one for each kind of layer, and those of the last step.
_RANGES = 8


@dataclass(frozen=True)
class OnnxCacheShape:
    """Layout of the caches of a target, a :class:`moa_server.engine.target_pass.CacheShape`.

    Attributes:
        dtype: of keys and values.
        feature_size: size of the features; 0 if none are kept.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: type[np.floating[Any]]
    feature_size: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        numbers = 2 * self.layers * self.kv_heads * self.head_dim
        return numbers * np.dtype(self.dtype).itemsize + self.feature_size * 4

    def new_cache(self, capacity: int) -> OnnxCache:
        """Make an empty cache for at least ``capacity`` tokens."""
        return OnnxCache(self, capacity)


class OnnxCache:
    """See :class:`moa_server.engine.target_pass.Cache`.

    Attributes:
        keys: ``[layers, blocks, kv_heads, head_dim, BLOCK]``.
        values: ``[layers, blocks, kv_heads, BLOCK, head_dim]``. The first blocks of a layer are one piece of memory.
        features: float32 ``[capacity, feature_size]``.
    """

    def __init__(self, shape: OnnxCacheShape, capacity: int) -> None:
        self.shape, self.capacity = shape, rounded_up(capacity)
        outer, numbers = (shape.layers, self.capacity // BLOCK, shape.kv_heads), shape.head_dim
        self.keys = _zeros((*outer, numbers, BLOCK), shape.dtype)
        self.values = _zeros((*outer, BLOCK, numbers), shape.dtype)
        self.features: Float32 = _zeros((self.capacity, shape.feature_size), np.float32)
        self._handles: dict[tuple[int, int], list[tuple[Any, Any]]] = {}

    def resized(self, capacity: int, used: int) -> OnnxCache:
        """See :meth:`moa_server.engine.target_pass.Cache.resized`."""
        other = OnnxCache(self.shape, capacity)
        blocks = rounded_up(used) // BLOCK
        other.keys[:, :blocks], other.values[:, :blocks] = self.keys[:, :blocks], self.values[:, :blocks]
        other.features[:used] = self.features[:used]
        return other

    def read(self, layers: Sequence[int], start: int, stop: int) -> Float32:
        """See :meth:`moa_server.engine.target_pass.Cache.read`; float32."""
        slots = np.arange(start, stop)
        block, place, chosen = slots // BLOCK, slots % BLOCK, np.array(layers, np.int64)[:, None]
        # Indices beside a slice put their axes first: [layers, n, kv_heads, head_dim].
        halves = self.keys[chosen, block, :, :, place], self.values[chosen, block, :, place]
        flat_shape = len(layers), len(slots), self.shape.kv_heads * self.shape.head_dim
        flat = [half.astype(np.float32).reshape(flat_shape) for half in halves]
        return np.ascontiguousarray(np.concatenate(flat, -1).transpose(1, 0, 2))

    def keep(self, start: int, path: Sequence[int]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.keep`."""
        if list(path) == list(range(len(path))):  # a chain stays where it lies
            return
        old, new = start + np.array(path), start + np.arange(len(path))
        self.keys[:, new // BLOCK, :, :, new % BLOCK] = self.keys[:, old // BLOCK, :, :, old % BLOCK]
        self.values[:, new // BLOCK, :, new % BLOCK] = self.values[:, old // BLOCK, :, old % BLOCK]
        self.features[new] = self.features[old]

    def resumable(self, length: int) -> int:
        """See :meth:`moa_server.engine.target_pass.Cache.resumable`."""
        return length

    def block_states(self, index: int) -> tuple[NDArray[Any], ...]:
        """See :meth:`moa_server.engine.target_pass.Cache.block_states`."""
        return tuple(part.copy() for part in self._parts(index))

    def set_block_states(self, index: int, states: tuple[NDArray[Any], ...]) -> None:
        """See :meth:`moa_server.engine.target_pass.Cache.set_block_states`."""
        for part, given in zip(self._parts(index), states, strict=True):
            part[:] = given

    def _parts(self, index: int) -> tuple[NDArray[Any], ...]:
        slots = slice(index * BLOCK, (index + 1) * BLOCK)
        return self.keys[:, index], self.values[:, index], self.features[slots]

    def writes(self, start: int, keys: NDArray[Any], values: NDArray[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield destinations and sources to copy, in pairs, for tokens from the slot ``start`` on.

        Args:
            keys, values: the tokens' of any layer, ``[n, kv_heads * head_dim]``.

        Yields:
            destinations of the keys, layer by layer, and their source; the same for the values.
        """
        done, shape = 0, self.shape
        while done < len(keys):
            block, place = divmod(start + done, BLOCK)
            size = min(len(keys) - done, BLOCK - place)
            rows, slots = slice(done, done + size), slice(place, place + size)
            new = [half[rows].reshape(size, shape.kv_heads, shape.head_dim) for half in (keys, values)]
            yield (
                *(list(self.keys[:, block, :, :, slots]), new[0].transpose(1, 2, 0)),
                *(list(self.values[:, block, :, slots]), new[1].transpose(1, 0, 2)),
            )
            done += size

    def handles(self, first: int, stop: int) -> list[tuple[Any, Any]]:
        """Return onnxruntime's handles of keys and values in a range of blocks, layer by layer."""
        found = self._handles.get((first, stop))
        if found is None:
            while len(self._handles) >= _RANGES:
                self._handles.pop(next(iter(self._handles)))
            halves = zip(self.keys[:, first:stop], self.values[:, first:stop], strict=True)
            found = [(handle(keys), handle(values)) for keys, values in halves]
            self._handles[first, stop] = found
        return found


def handle(array: NDArray[Any]) -> Any:
    """Return onnxruntime's view of an array's memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def _zeros(size: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Allocate zeros as pages that the system maps on first use.

    The cache of a long prompt is hundreds of megabytes: writing them at once would delay a step, as would huge pages,
    one of which holds all keys of a layer.
    """
    wanted = math.prod(size) * np.dtype(dtype).itemsize
    if wanted < mmap.PAGESIZE:
        return np.zeros(size, dtype)
    pages = mmap.mmap(-1, wanted)  # begins at a page, so results do not depend on where it lies
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(size)
