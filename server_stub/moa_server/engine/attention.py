"""Attention of a few tokens to the keys of their sequence, computed so that nothing beside a token changes its result.

A sum of floating-point numbers depends on the order of its terms. Library kernels choose that order by the shapes they
are given, so the same token would get other bits in a larger draft, another chunk or a tree. Here the order is fixed:

* Keys are taken in blocks of 64 by *position*; within a block the products add one key after the other, and masked
  keys add zero. The blocks' results are added block by block. Neither a longer context nor a mask changes that.
* The nodes of a tree lie in the slots after the prefix in the order they were sent, so that siblings push one another
  away from the slot that equals their position. Their block is therefore multiplied in one piece as wide as the tree,
  once for each block of positions, with the keys of other positions masked.
* The normaliser adds the weights of a block along a row, in an order that libraries choose by the row's length alone.
  Those of a tree are first put where their positions are.

Libraries add one key after the other up to some width, 192 where this was measured: a block and a tree of 128 tokens.
That all this holds on a given processor is checked, see :mod:`moa_server.engine.invariance`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moa_runtime.session.tree import chain, depths
from moa_server.engine.kv_cache import KVCache
from moa_server.engine.target_pass import BLOCK, Piece, rounded_up

#: Tokens whose queries are multiplied at once; bounds the memory of the scores.
TILE = 64
#: Query rows are padded to a multiple of the first and to at least the second: libraries compute fewer rows in other
#: ways.
_ROWS, _LEAST_ROWS = 4, 8


@dataclass(frozen=True)
class Heads:
    """Numbers of attention: key-value heads, query heads for each of those, their size, and the scores' factor."""

    kv: int
    per_kv: int
    size: int
    scale: float

    @property
    def query_factor(self) -> float:
        """Factor of the queries, so that weights are powers of two, which are faster than exponentials."""
        return self.scale * math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """Some tokens of a piece, and what they may look at.

    Attributes:
        first, count: the tokens' rows in the pass.
        blocks: key blocks that they look at.
        hidden_from: the first block in which some key is hidden from some token.
        visible: boolean ``[count, 64 * (blocks - hidden_from)]``: which keys from that block on they see.
        positions: for a tree, those of these keys, counted from the beginning of that block, int64
            ``[64 * (blocks - hidden_from)]``; 0 for hidden keys.
    """

    cache: KVCache
    first: int
    count: int
    blocks: int
    hidden_from: int
    visible: Tensor
    positions: Tensor | None = None


def tiles(piece: Piece, first: int) -> Iterator[Tile]:
    """Yield the tiles of a piece whose first token is the row ``first`` of the pass."""
    for start in range(0, len(piece.chain), TILE):
        count = min(TILE, len(piece.chain) - start)
        before = piece.cached + start
        blocks, hidden_from = rounded_up(before + count) // BLOCK, before // BLOCK
        slots = torch.arange(hidden_from * BLOCK, blocks * BLOCK)
        visible = slots <= torch.arange(before, before + count)[:, None]
        yield Tile(piece.cache, first + start, count, blocks, hidden_from, visible)
    if not piece.tree:
        return
    first, before, count = first + len(piece.chain), piece.cached + len(piece.chain), len(piece.tree)
    blocks, hidden_from = rounded_up(before + count) // BLOCK, before // BLOCK
    committed = before - hidden_from * BLOCK
    width = (blocks - hidden_from) * BLOCK
    visible = torch.zeros(count, width, dtype=torch.bool)
    visible[:, : committed + count] = tree_mask(committed, piece.parents)
    positions = torch.zeros(width, dtype=torch.int64)
    positions[:committed] = torch.arange(committed)
    positions[committed : committed + count] = committed - 1 + torch.tensor(depths(piece.parents))
    for start in range(0, count, TILE):
        rows = visible[start : start + TILE]
        yield Tile(piece.cache, first + start, len(rows), blocks, hidden_from, rows, positions)


class TileAttention:
    """Attention of one tile, for all layers of one pass; what is equal in all of them is made once.

    Args:
        queries: where the pass has the queries of each layer, multiplied by ``heads.query_factor``, ``[rows, kv_heads,
            heads per kv_head, head_dim]``.
        mixed: where the results go, of that shape.
        memory: float32, at least :func:`memory_needed` numbers; tiles may share it.
    """

    def __init__(self, heads: Heads, tile: Tile, queries: Tensor, mixed: Tensor, memory: Tensor) -> None:
        kv, height, blocks = heads.kv, _height(heads, tile), tile.blocks
        self._kv, self._blocks, self._hidden_from = kv, blocks, tile.hidden_from
        self.cache = tile.cache
        rows = slice(tile.first, tile.first + tile.count)

        def of_tokens(padded: Tensor) -> Tensor:
            """``[..., height, n]`` without the padding as ``[..., count, heads per kv_head, n]``."""
            return padded[..., : tile.count * heads.per_kv, :].unflatten(-2, (tile.count, heads.per_kv))

        like: dict[str, Any] = {"dtype": torch.float32, "device": memory.device}
        self._queries = torch.zeros(blocks * kv, height, heads.size, **like)
        self._filled = of_tokens(self._queries.view(blocks, kv, height, heads.size))
        self._fill_from = queries[rows].movedim(0, 1)
        self._scores, rest = _cut(memory, blocks * kv, height, BLOCK)
        self._parts, rest = _cut(rest, blocks * kv, height, heads.size)
        self._sums, _ = _cut(rest, blocks, kv, height)
        self._by_block = [each.view(blocks, kv, height, -1) for each in (self._scores, self._parts)]
        self._partly_hidden = self._by_block[0][tile.hidden_from :]
        self._peak = torch.empty(1, kv, height, 1, **like)
        width = blocks - tile.hidden_from
        bias = torch.zeros(width, height, BLOCK, **like)
        seen = tile.visible.view(tile.count, width, BLOCK).movedim(1, 0).repeat_interleave(heads.per_kv, 1)
        bias[:, : seen.shape[1]].masked_fill_(~seen.to(memory.device), float("-inf"))
        self._bias = bias[:, None]
        self._splits: list[Tensor] = []
        if tile.positions is not None:
            positions = tile.positions.to(memory.device)
            count = int(positions.max()) // BLOCK + 1
            self._splits = [(positions // BLOCK == block).float() for block in range(count)]
            self._places = functional.one_hot(positions, count * BLOCK).float()
        self._total, self._weight = torch.empty(kv, height, heads.size, **like), torch.empty(kv, height, **like)
        self._result = of_tokens(self._total), of_tokens(self._weight[..., None]), mixed[rows].movedim(0, 1)

    def attend(self, layer: int) -> None:
        """Compute one layer: from the queries that are there now to the results."""
        keys, values = self.cache.views(layer, self._blocks)
        self._filled.copy_(self._fill_from)
        torch.bmm(self._queries, keys, out=self._scores)
        self._partly_hidden.add_(self._bias)
        scores, parts = self._by_block
        torch.amax(scores, (0, 3), keepdim=True, out=self._peak)
        scores.sub_(self._peak).exp2_()
        if self._splits:
            parts, sums = self._mix_tree(values)
        else:
            torch.bmm(self._scores, values, out=self._parts)
            sums = torch.sum(scores, -1, out=self._sums)
        torch.sum(parts, 0, out=self._total)
        self._weight.copy_(sums.cumsum(0)[-1])  # a sum of narrow columns would add them in another order
        total, weight, result = self._result
        torch.div(total, weight, out=result)

    def _mix_tree(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return each block's result for a tree, ``[parts, kv_heads, height, head_dim]``, and its sums of weights."""
        start, kv, scores = self._hidden_from, self._kv, self._by_block[0]
        tail = scores[start:].permute(1, 2, 0, 3).flatten(2)
        tail_values = values[start * kv :].unflatten(0, (-1, kv)).transpose(0, 1).flatten(1, 2)
        whole = self._scores[: start * kv]
        parts = [torch.bmm(whole, values[: start * kv]).unflatten(0, (start, kv))] if start else []
        parts += [torch.bmm(tail * chosen, tail_values)[None] for chosen in self._splits]
        placed = torch.matmul(tail, self._places).unflatten(-1, (-1, BLOCK))
        return torch.cat(parts), torch.cat((scores[:start].sum(-1), placed.sum(-1).movedim(-1, 0)))


def memory_needed(heads: Heads, chosen: Sequence[Tile]) -> int:
    """Numbers of the memory that the largest of the tiles needs."""
    per_row = BLOCK + heads.size + 1
    return max(tile.blocks * heads.kv * _height(heads, tile) * per_row for tile in chosen)


def _height(heads: Heads, tile: Tile) -> int:
    return max(_LEAST_ROWS, rounded_up(tile.count * heads.per_kv, _ROWS))


def _cut(memory: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    size = math.prod(shape)
    return memory[:size].view(shape), memory[size:]


def tree_mask(cached: int, parents: Sequence[int]) -> Tensor:
    """Return the attention mask of a tree after ``cached`` tokens, boolean ``[n, cached + n]``: each node sees those,
    its ancestors and itself. ``tree_mask(1, [0, 1, 1])`` is ``[[1,1,0,0], [1,1,1,0], [1,1,0,1]]``."""
    count = len(parents)
    mask = torch.ones(count, cached + count, dtype=torch.bool)
    own = mask[:, cached:]
    if list(parents) == chain(count):
        own.copy_(own.tril())
        return mask
    own.copy_(torch.eye(count, dtype=torch.bool))
    for index, parent in enumerate(parents):
        if parent:
            own[index] |= own[parent - 1]
    return mask
