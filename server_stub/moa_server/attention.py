"""Attention of a few tokens to the keys of their sequence, computed so that nothing beside a token changes its result.

A sum of floating-point numbers depends on the order of its terms. Library kernels choose that order by the shapes they
are given, so the same token would get other bits in a larger draft, another chunk or a tree. Here the order is fixed:

* Keys are taken in blocks of 64 by *position*; within a block the products add one key after the other, and masked
  keys add zero. What the blocks gave is added block by block. Neither a longer context nor a mask changes that.
* The nodes of a tree lie in the slots behind the prefix in the order they were sent, so that siblings push one another
  away from the slot that equals their position. Their block is therefore multiplied in one piece as wide as the tree,
  once for each block of positions, with the keys of other positions masked.
* The normaliser is a product too (with ones), for a reduction along a row would add in an order of slots.

That this holds on a given processor is checked, see :mod:`moa_server.invariance`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moa_runtime.session.tree import depths
from moa_server.rooms import BLOCK, Room, rounded_up
from moa_server.target_pass import Piece
from moa_server.tree_mask import tree_mask

#: Tokens whose queries are multiplied at once; bounds the memory of the scores.
TILE = 64
#: Query rows are padded to a multiple of this: below it libraries compute in other ways.
_ROWS = 8
#: Columns of ones: a product with a single column would be another kind of kernel.
_ONES = 16


@dataclass(frozen=True)
class Heads:
    """Numbers of attention: key-value heads, query heads for each of those, their size, and the scores' factor."""

    kv: int
    per_kv: int
    size: int
    scale: float


class Tile:
    """Queries of some tokens of a piece, and what they may look at; made once a step for all layers.

    Args:
        first: the tokens' first row in the pass.
        count: tokens.
        blocks: key blocks that they look at.
        hidden_from: the first block in which some key is hidden from some token.
        visible: boolean ``[count, 64 * (blocks - hidden_from)]``: which keys from that block on they see.
        own_block: for a tree, the block of positions that each of those keys belongs to, counted from ``hidden_from``,
            int64 ``[64 * (blocks - hidden_from)]``.
    """

    def __init__(
        self,
        heads: Heads,
        room: Room,
        first: int,
        count: int,
        blocks: int,
        hidden_from: int,
        visible: Tensor,
        own_block: Tensor | None = None,
    ) -> None:
        self._heads, self.room, self._blocks, self._hidden_from = heads, room, blocks, hidden_from
        self.rows = slice(first, first + count)
        height = rounded_up(count * heads.per_kv, _ROWS)
        where = {"dtype": room.kv.dtype, "device": room.kv.device}
        self._queries = torch.zeros(blocks * heads.kv, height, heads.size, **where)
        self._filled = self._queries.view(blocks, heads.kv, height, heads.size)[:, :, : count * heads.per_kv]
        self._filled = self._filled.unflatten(2, (count, heads.per_kv))
        self._ones = torch.ones(1, 1, 1, **where).expand(blocks * heads.kv, BLOCK, _ONES).contiguous()
        width = blocks - hidden_from
        bias = torch.zeros(width, 1, height, BLOCK, **where)
        seen = visible.view(count, width, BLOCK).movedim(1, 0).repeat_interleave(heads.per_kv, 1)
        bias[:, 0, : seen.shape[1]].masked_fill_(~seen.to(room.kv.device), float("-inf"))
        self._bias = bias
        self._split: list[Tensor] = []
        if own_block is not None:
            blocks_of_positions = range(int(own_block.max()) + 1)
            self._split = [(own_block == block).to(**where) for block in blocks_of_positions]
            self._tail_ones = torch.ones(heads.kv, width * BLOCK, _ONES, **where)

    def attend(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """One layer.

        Args:
            keys, values: ``[blocks of the room, kv_heads, 64, head_dim]``.
            queries: of the tile's tokens, ``[count, kv_heads, heads per kv_head, head_dim]``.

        Returns:
            ``[count, kv_heads, heads per kv_head, head_dim]``.
        """
        heads, blocks = self._heads, self._blocks
        self._filled.copy_(queries.movedim(0, 1))
        flat = self._queries
        scores = torch.bmm(flat, keys[:blocks].flatten(0, 1).transpose(1, 2)).mul_(heads.scale)
        scores = scores.view(blocks, heads.kv, -1, BLOCK)
        scores[self._hidden_from :] += self._bias
        scores -= scores.amax(-1, keepdim=True).amax(0, keepdim=True)
        scores.exp_()
        if self._split:
            mixed, normaliser = self._mix_tree(scores, values)
        else:
            mixed, normaliser = self._mix(scores, values, blocks)
        mixed = mixed / normaliser[..., :1]
        count = self.rows.stop - self.rows.start
        return mixed[:, : count * heads.per_kv].unflatten(1, (count, heads.per_kv)).movedim(0, 1)

    def _mix(self, weights: Tensor, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Weighted sums of the values of the first blocks, and sums of the weights."""
        flat = weights[:blocks].flatten(0, 1)
        shape = (blocks, self._heads.kv, flat.shape[1])
        mixed = torch.bmm(flat, values[:blocks].flatten(0, 1)).view(*shape, -1)
        sums = torch.bmm(flat, self._ones[: len(flat)]).view(*shape, -1)
        return mixed.sum(0), sums.sum(0)

    def _mix_tree(self, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        start, blocks = self._hidden_from, self._blocks
        kv, height = weights.shape[1:3]
        tail = weights[start:].permute(1, 2, 0, 3).reshape(kv, height, -1)
        tail_values = values[start:blocks].transpose(0, 1).reshape(kv, -1, values.shape[-1])
        parts = []
        if start:
            flat = weights[:start].flatten(0, 1)
            parts.append(torch.bmm(flat, values[:start].flatten(0, 1)).view(start, kv, height, -1))
            sums = [torch.bmm(flat, self._ones[: len(flat)]).view(start, kv, height, -1)]
        else:
            sums = []
        for chosen in self._split:
            some = tail * chosen
            parts.append(torch.bmm(some, tail_values)[None])
            sums.append(torch.bmm(some, self._tail_ones)[None])
        return torch.cat(parts).sum(0), torch.cat(sums).sum(0)


def tiles(heads: Heads, piece: Piece, first: int) -> Iterator[Tile]:
    """The tiles of a piece whose first token is the row ``first`` of the pass."""
    for start in range(0, len(piece.chain), TILE):
        count = min(TILE, len(piece.chain) - start)
        before = piece.cached + start
        blocks, hidden_from = rounded_up(before + count) // BLOCK, before // BLOCK
        slots = torch.arange(hidden_from * BLOCK, blocks * BLOCK)
        visible = slots <= torch.arange(before, before + count)[:, None]
        yield Tile(heads, piece.room, first + start, count, blocks, hidden_from, visible)
    if piece.tree:
        yield from _tree_tiles(heads, piece, first + len(piece.chain))


def _tree_tiles(heads: Heads, piece: Piece, first: int) -> Iterator[Tile]:
    before, count = piece.cached + len(piece.chain), len(piece.tree)
    blocks, hidden_from = rounded_up(before + count) // BLOCK, before // BLOCK
    committed = before - hidden_from * BLOCK
    width = (blocks - hidden_from) * BLOCK
    visible = torch.zeros(count, width, dtype=torch.bool)
    visible[:, : committed + count] = tree_mask(committed, piece.parents)
    own_block = torch.zeros(width, dtype=torch.int64)
    own_block[committed : committed + count] = (committed - 1 + torch.tensor(depths(piece.parents))) // BLOCK
    for start in range(0, count, TILE):
        rows = visible[start : start + TILE]
        yield Tile(heads, piece.room, first + start, len(rows), blocks, hidden_from, rows, own_block)
