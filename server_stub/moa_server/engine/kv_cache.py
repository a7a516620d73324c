"""Memory for the keys and values of one sequence, and for its last hidden states where memory rows need them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Tokens side by side in a room of blocks, and what every room is a multiple of.
BLOCK = 64


@dataclass(frozen=True)
class RoomShape:
    """What the rooms of a target look like.

    Attributes:
        blocks: whether the tokens lie in blocks of :data:`BLOCK`, head after head in each; else in one block as long as
            the room.
        last_size: size of the last hidden states; 0 where they are not kept.
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
        """What a token takes."""
        return (2 * self.layers * self.kv_heads * self.head_dim + self.last_size) * self.dtype.itemsize


class Room:
    """Keys, after RoPE, and values of up to ``capacity`` tokens. A token's place in it is its *slot*.

    Attributes:
        keys, values: ``[layers, blocks, kv_heads, block, head_dim]`` each. Slots never written hold zeros, so that
            products with them are zeros and not what memory happened to hold. In a room of blocks the keys lie
            dimension by dimension, as the products of queries with them want it.
        last: ``[capacity, last_size]``.
    """

    def __init__(self, shape: RoomShape, capacity: int) -> None:
        self.shape, self.capacity = shape, rounded_up(capacity)
        self.block = BLOCK if shape.blocks else self.capacity
        outer = (shape.layers, self.capacity // self.block, shape.kv_heads)
        self.values = _zeros(shape, *outer, self.block, shape.head_dim)
        if shape.blocks:
            self.keys = _zeros(shape, *outer, shape.head_dim, self.block).transpose(-2, -1)
        else:
            self.keys = _zeros(shape, *outer, self.block, shape.head_dim)
        self.last = _zeros(shape, self.capacity, shape.last_size)
        self._views: tuple[int, list[tuple[Tensor, Tensor]]] = (0, [])

    def resized(self, capacity: int, used: int) -> Room:
        """Another room with the first ``used`` tokens of this one."""
        other = Room(self.shape, capacity)
        other.last[:used] = self.last[:used]
        for block, _, part in self.segments(0, used):
            held = part.stop - part.start
            other.keys[:, block, :, :held] = self.keys[:, block, :, :held]
            other.values[:, block, :, :held] = self.values[:, block, :, :held]
        return other

    def segments(self, start: int, count: int) -> Iterator[tuple[int, int, slice]]:
        """Where ``count`` tokens from the slot ``start`` on lie: block, first place in it, and which of the tokens."""
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
        """Of the tokens from the slot ``start`` on move those with the indices ``path``, ascending, to the front."""
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


def _zeros(like: RoomShape, *size: int) -> Tensor:
    """Zeros in the type and on the device of a room; on a CPU, pages that the system gives one by one as they are used.

    A room for a long prompt is hundreds of megabytes, and to write them at once would hold up a step; so would huge
    pages, one of which is a layer's whole keys.
    """
    wanted = math.prod(size) * like.dtype.itemsize
    if like.device.type != "cpu" or wanted < mmap.PAGESIZE:
        return torch.zeros(size, dtype=like.dtype, device=like.device)
    pages = mmap.mmap(-1, wanted)  # begins at a page, so results do not depend on where it lies
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(size)
