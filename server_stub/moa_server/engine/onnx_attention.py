"""Caches of keys and values in numpy, and attention in onnxruntime that nothing beside a token changes.

A sum of floating-point numbers depends on the order of its terms. Library kernels choose that order by the shapes they
are given, so the same token would get other bits in a larger draft, another chunk or a tree. Here the order is fixed:

* Keys are taken in blocks of 64 by *position*; within a block the products add one key after the other, and masked
  keys add zero. The blocks' results are added block by block. Neither a longer context nor a mask changes that.
* The nodes of a tree lie in the slots after the prefix in the order they were sent, so that siblings push one another
  away from the slot that equals their position. Their block is therefore multiplied in one piece as wide as the tree,
  once for each block of positions, with the keys of other positions masked.
* Libraries add one key after the other up to some width only, which is larger for narrow products. Wide trees are
  therefore multiplied with a few columns of the values at a time.
* The normaliser is a product of the weights with ones, and so is added in the same order.

Products of a single row take another way in libraries, so there are at least two. That all this holds on a given
processor is checked, see :mod:`moa_server.engine.invariance`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.spec import LayerSpec
from moa_runtime.session.tree import depths
from moa_server.engine.base import Float32
from moa_server.engine.onnx_sessions import session_options
from moa_server.engine.target_pass import BLOCK, Piece, rounded_up

#: Tokens whose queries are multiplied at once; bounds the memory of the scores.
TILE = 64
#: From this many blocks of keys times rows (and 16 for reading the keys) on, several threads are quicker for one tile.
_WORTH_THREADS = 1024
#: Columns of the ones, and of the values of wide trees; a product with a single column takes another way.
_COLUMNS = 16
#: Blocks of a tree that is not wide: 128 keys are added one after the other for any columns, 1,024 for 16 columns.
_NARROW = 2
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


@dataclass(frozen=True)
class AttentionKind:
    """What attention of a layer computes; layers of one kind share graphs and masks."""

    kv_heads: int
    per_kv: int
    head_dim: int
    cap: float
    window: int | None

    @classmethod
    def of(cls, spec: LayerSpec) -> AttentionKind:
        per_kv = spec.heads // spec.kv_heads
        return cls(spec.kv_heads, per_kv, spec.head_dim, spec.attention_cap, spec.window)


@dataclass(frozen=True)
class Tile:
    """Some tokens of a piece, and what they may look at.

    Attributes:
        first: the first token's row in the pass.
        blocks: the range of key blocks that they look at.
        bias: what is added to the scores: 0, or ``-inf`` for hidden keys, ``[blocks, 1, tokens, BLOCK]``.
        tail: for a tree, how many blocks at the end hold its nodes.
        chosen: for a tree, for each block of positions whether a key of the tail belongs to it: 1 or 0,
            ``[blocks of positions, 1, 1, tail * BLOCK]``.
    """

    cache: OnnxCache
    first: int
    blocks: range
    bias: Float32
    tail: int = 0
    chosen: Float32 | None = None

    @property
    def count(self) -> int:
        return self.bias.shape[2]


def tiles(piece: Piece, first: int, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of a piece whose first token is the row ``first`` of the pass.

    Args:
        window: see :attr:`moa_decoder.spec.LayerSpec.window`.
    """
    for start in range(0, len(piece.chain), TILE):
        count = min(TILE, len(piece.chain) - start)
        own = np.arange(piece.cached + start, piece.cached + start + count)
        blocks = _blocks(own[0], own[-1] + 1, window)
        slots = np.arange(blocks.start * BLOCK, blocks.stop * BLOCK)
        yield Tile(piece.cache, first + start, blocks, _bias(slots <= own[:, None], own, slots, window))
    if not piece.tree:
        return
    first, before, count = first + len(piece.chain), piece.cached + len(piece.chain), len(piece.tree)
    own = before - 1 + np.array(depths(piece.parents))
    blocks = _blocks(before, before + count, window)
    slots = np.arange(blocks.start * BLOCK, blocks.stop * BLOCK)
    at = before - slots[0]  # where the tree's nodes begin
    seen = np.broadcast_to(slots < before, (count, len(slots))).copy()
    seen[:, at : at + count] = _ancestors(piece.parents)
    positions = slots.copy()
    positions[at : at + count] = own
    hidden_from = before // BLOCK
    tail = positions[(hidden_from - blocks.start) * BLOCK :]
    tail[at + count - (hidden_from - blocks.start) * BLOCK :] = -1  # of no block
    chosen = (tail // BLOCK == np.arange(hidden_from, own.max() // BLOCK + 1)[:, None]).astype(np.float32)
    for start in range(0, count, TILE):
        rows = slice(start, start + TILE)
        bias = _bias(seen[rows], own[rows], positions, window)
        yield Tile(piece.cache, first + start, blocks, bias, blocks.stop - hidden_from, chosen[:, None, None])


def _blocks(start: int, stop: int, window: int | None) -> range:
    """The key blocks that tokens from the position ``start`` on may see."""
    return range(0 if window is None else max(0, start - window + 1) // BLOCK, rounded_up(stop) // BLOCK)


def _bias(seen: NDArray[np.bool_], own: NDArray[np.int64], keys: NDArray[np.int64], window: int | None) -> Float32:
    """
    Args:
        seen: ``[tokens, keys]``, without the window.
        own, keys: positions of tokens and keys.
    """
    if window is not None:
        seen = seen & (keys > own[:, None] - window)
    bias = np.where(seen, np.float32(0), np.float32(-np.inf)).reshape(len(own), -1, BLOCK)
    return np.ascontiguousarray(bias.transpose(1, 0, 2))[:, None]


def _ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which nodes each node of a tree sees: its ancestors and itself, ``[n, n]``."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for index, parent in enumerate(parents):
        if parent:
            seen[index] |= seen[parent - 1]
    return seen


class OnnxAttention:
    """Attention of one kind, for chains and for trees.

    Args:
        dtype: of keys and values.
    """

    def __init__(self, kind: AttentionKind, dtype: type[np.floating[Any]]) -> None:
        self._kind, self._dtype = kind, dtype
        self._sessions: dict[tuple[int, bool, int], ort.InferenceSession] = {}

    def bound(self, tile: Tile, queries: Float32, mixed: Float32, threads: int) -> BoundAttention:
        """Prepare a tile for all layers of a pass.

        Args:
            queries, mixed: where the pass has each layer's queries and wants the results, ``[rows, heads * head_dim]``.
            threads: that may compute the tile.
        """
        kind = self._kind
        work = len(tile.blocks) * kind.kv_heads * (tile.count * kind.per_kv + 16)
        threads = threads if work >= _WORTH_THREADS else 1
        form = min(tile.tail, _NARROW + 1), tile.count * kind.per_kv == 1, threads
        if form not in self._sessions:
            self._sessions[form] = self._session(*form)
        bias = np.tile(tile.bias, (1, 1, kind.per_kv, 1))
        return BoundAttention(self._sessions[form], tile, bias, queries, mixed)

    def _session(self, tail: int, single: bool, threads: int) -> ort.InferenceSession:
        """
        Args:
            tail: last blocks that hold a tree, if any.
            single: whether products would have a single row, which is then taken twice.
        """
        kind, graph = self._kind, GraphBuilder()
        kv, per_kv, size, integers = kind.kv_heads, kind.per_kv, kind.head_dim, graph.integers
        keys, values = "keys", "values"
        if self._dtype is not np.float32:
            keys, values = (graph.cast(half, np.float32) for half in (keys, values))
        split = graph.op("Reshape", "queries", integers(-1, kv, per_kv, size))
        rows = graph.op("Reshape", graph.op("Transpose", split, perm=[1, 2, 0, 3]), integers(1, kv, -1, size))
        if single:
            rows = graph.op("Concat", rows, rows, axis=2)
        scores = graph.capped(graph.op("MatMul", rows, keys), kind.cap)
        scores = graph.op("Add", scores, "bias")
        peak = graph.op("ReduceMax", scores, integers(0, 3), keepdims=1)
        weights = graph.op("Exp", graph.op("Sub", scores, peak))
        ones = graph.constant(np.ones((BLOCK, _COLUMNS), np.float32))
        if tail:
            mixed, total = self._tree(graph, weights, values, ones, wide=tail > _NARROW)
        else:
            mixed, total = graph.op("MatMul", weights, values), graph.op("MatMul", weights, ones)
        mixed, total = (graph.op("ReduceSum", each, integers(0), keepdims=0) for each in (mixed, total))
        mixed = graph.op("Div", mixed, graph.op("Slice", total, integers(0), integers(1), integers(2)))
        if single:
            mixed = graph.op("Slice", mixed, integers(0), integers(1), integers(1))
        mixed = graph.op("Reshape", mixed, integers(kv, per_kv, -1, size))
        mixed = graph.op("Transpose", mixed, perm=[2, 0, 1, 3])
        graph.op("Reshape", mixed, integers(-1, kv * per_kv * size), name="mixed")
        inputs: dict[str, Port] = {
            "queries": (np.float32, ["n", kv * per_kv * size]),
            "keys": (self._dtype, ["blocks", kv, size, BLOCK]),
            "values": (self._dtype, ["blocks", kv, BLOCK, size]),
            "bias": (np.float32, ["blocks", 1, "rows", BLOCK]),
        }
        if tail:
            inputs |= {"parts": (np.int64, [2]), "chosen": (np.float32, ["positions", 1, 1, "tail"])}
            inputs |= {"tail_ones": (np.float32, ["tail", _COLUMNS])}
        return graph.session(inputs, {"mixed": (np.float32, ["n", kv * per_kv * size])}, session_options(threads))

    def _tree(self, graph: GraphBuilder, weights: str, values: str, ones: str, *, wide: bool) -> tuple[str, str]:
        """Products of each block before the tree, and of the tree's blocks with the keys of each block of positions."""
        kv, size, integers = self._kind.kv_heads, self._kind.head_dim, graph.integers
        before, tail = graph.ops("Split", weights, "parts", outputs=2, axis=0)
        values_before, values_tail = graph.ops("Split", values, "parts", outputs=2, axis=0)
        tail = graph.op("Transpose", tail, perm=[1, 2, 0, 3])
        tail = graph.op("Mul", graph.op("Reshape", tail, integers(0, 0, -1)), "chosen")
        values_tail = graph.op("Transpose", values_tail, perm=[1, 0, 2, 3])
        values_tail = graph.op("Reshape", values_tail, integers(1, kv, -1, size))
        if wide and size % _COLUMNS == 0:
            values_tail = graph.op("Reshape", values_tail, integers(kv, -1, size // _COLUMNS, _COLUMNS))
            values_tail = graph.op("Transpose", values_tail, perm=[0, 2, 1, 3])
            columns = graph.op("MatMul", graph.op("Unsqueeze", tail, integers(2)), values_tail)
            columns = graph.op("Transpose", columns, perm=[0, 1, 3, 2, 4])
            mixed_tail = graph.op("Reshape", columns, integers(0, kv, -1, size))
        else:
            mixed_tail = graph.op("MatMul", tail, values_tail)
        mixed = graph.op("MatMul", before, values_before), mixed_tail
        total = graph.op("MatMul", before, ones), graph.op("MatMul", tail, "tail_ones")
        return graph.op("Concat", *mixed, axis=0), graph.op("Concat", *total, axis=0)


class BoundAttention:
    """Attention of one tile, for all layers of one pass; what is equal in all of them is made once."""

    def __init__(
        self, session: ort.InferenceSession, tile: Tile, bias: Float32, queries: Float32, mixed: Float32
    ) -> None:
        rows = slice(tile.first, tile.first + tile.count)
        given: dict[str, NDArray[Any]] = {"queries": queries[rows], "bias": bias}
        if tile.chosen is not None:
            given["parts"] = np.array([len(tile.blocks) - tile.tail, tile.tail])
            given["chosen"] = tile.chosen
            given["tail_ones"] = np.ones((tile.tail * BLOCK, _COLUMNS), np.float32)
        self._binding, self._run, self._given = session.io_binding(), session.run_with_iobinding, given
        for name, array in given.items():
            self._binding.bind_ortvalue_input(name, handle(array))
        self._binding.bind_ortvalue_output("mixed", handle(mixed[rows]))
        self._handles = tile.cache.handles(tile.blocks.start, tile.blocks.stop)

    def attend(self, layer: int) -> None:
        """Compute one layer: from the queries that are there now to the results."""
        keys, values = self._handles[layer]
        self._binding.bind_ortvalue_input("keys", keys)
        self._binding.bind_ortvalue_input("values", values)
        self._run(self._binding)
