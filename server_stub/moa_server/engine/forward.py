"""What a forward pass of the target takes and gives, whoever computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moa_server.engine.kv_cache import Room, RoomShape


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence behind those in its room: a chain, and a tree that hangs from the end of the chain.

    Attributes:
        cached: tokens in the room before these; the piece's own tokens take the slots behind them, in order.
        chain: tokens of the chain; at least one where there is no cached token.
        tree, parents: a tree as in :mod:`moa_runtime.session.tree`; a draft that is a chain belongs to ``chain``.
        shift: what is added to all positions, to try a pass far into a context without the tokens before.
    """

    room: Room
    cached: int
    chain: Sequence[int]
    tree: Sequence[int] = ()
    parents: Sequence[int] = ()
    shift: int = 0

    def __len__(self) -> int:
        return len(self.chain) + len(self.tree)


class TargetPass(Protocol):
    """Computes forward passes of the target. Rooms must hold ``cached + len(piece)`` tokens."""

    @property
    def room_shape(self) -> RoomShape: ...

    @property
    def has_own_weights(self) -> bool:
        """Whether the layers of the target it was made from may be freed."""

    def forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, int]:
        """Run the target over all pieces; their keys and values are in the rooms afterwards.

        Returns:
            normed last hidden states ``[tokens of all pieces, hidden]``, and the number of forwards it took.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden]`` -> float32 logits ``[n, vocab_size]``."""
