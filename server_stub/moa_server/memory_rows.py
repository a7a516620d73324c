"""Memory rows: what the drafter's server half makes of the target's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moa_drafter.drafter import Drafter
from moa_drafter.llama import KeysValues
from moa_drafter.model import MoADrafter
from moa_drafter.states import Reads, TargetStates
from moa_server.engine import Rows
from moa_server.packed_rows import PackedRows


class HeldStates(Protocol):
    """The target's states of one sequence, as a :class:`moa_server.rooms.Room` has them.

    Attributes:
        last: last hidden states ``[slots, hidden]``; ``[slots, 0]`` where they are not kept.
    """

    last: Tensor

    def read(self, layers: Sequence[int], start: int, stop: int) -> Tensor:
        """See :meth:`moa_server.rooms.Room.read`."""


#: As :meth:`moa_drafter.drafter.Drafter.rows`.
ServerHalf = Callable[[TargetStates, Tensor], KeysValues]

#: Rows computed at once; bounds the memory they take.
_CHUNK = 512


def server_half(drafter: Drafter, dtype: torch.dtype) -> ServerHalf:
    """What computes a drafter's rows quickest, with products in the target's type where it can choose."""
    if isinstance(drafter, MoADrafter) and not drafter.config.target_layers:
        return PackedRows(drafter, dtype)
    return drafter.rows


def memory_rows(
    drafter: Drafter | None, half: ServerHalf | None, held: HeldStates | None, start: int | None, end: int
) -> Rows | None:
    """The rows of the tokens from position ``start`` to ``end``, which ``held`` has.

    Args:
        half: of :func:`server_half`; None without a drafter.

    Returns:
        None where none are wanted, there is no drafter, or it takes none.
    """
    if start is None or drafter is None or half is None or not drafter.row_reads or held is None:
        return None
    weight = next(drafter.parameters())
    parts = []
    # At least one part, empty if need be, for the shape of its rows.
    for first in range(start, max(end, start + 1), _CHUNK):
        stop = max(first, min(first + _CHUNK, end))
        states = _states(held, drafter.row_reads, first, stop).to(weight.device).to(weight.dtype)
        rows = half(states, torch.arange(first, stop, device=weight.device))
        parts.append([part.float().cpu().numpy() for part in rows])
    keys, values = (np.concatenate(halves) for halves in zip(*parts, strict=True))
    return Rows(start, keys, values)


def _states(held: HeldStates, reads: Reads, start: int, stop: int) -> TargetStates:
    """What a drafter reads of the tokens ``start`` to ``stop``."""
    nothing = held.last.new_empty(stop - start, 0, 0)
    kv = held.read(reads.kv_layers, start, stop) if reads.kv_layers else nothing
    return TargetStates(kv, nothing, held.last[start:stop] if reads.last else nothing.flatten(1))
