"""Muon whose processes each orthogonalise some of the matrices, which is most of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moa_drafter.training import distributed as processes


class SharedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` for processes that hold the same weights and gradients; alone it is that.

    Each matrix has an owner, who steps it and sends it to the others. A matrix's momentum stays with its owner until
    :meth:`state_dict` is called, which every process must do.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See :class:`torch.optim.Muon`; gradients of matrices of other owners are forgotten."""
        matrices, owners = self._owned()
        for matrix, owner in zip(matrices, owners, strict=True):
            if owner != processes.rank():
                matrix.grad = None  # the optimiser steps over what has none
        loss = super().step(closure)
        processes.copy_from(owners, matrices)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """See :class:`torch.optim.Muon`; the same in every process."""
        matrices, owners = self._owned()
        for matrix in matrices:
            self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        processes.copy_from(owners, [self.state[matrix]["momentum_buffer"] for matrix in matrices])
        return super().state_dict()

    def _owned(self) -> tuple[list[Tensor], list[int]]:
        """All matrices, and the process that owns each."""
        matrices = [matrix for group in self.param_groups for matrix in group["params"]]
        # Products of the smaller side with itself and with the whole.
        costs = [min(matrix.shape) ** 2 * sum(matrix.shape) for matrix in matrices]
        return matrices, share_out(costs, processes.count())


def share_out(costs: Sequence[float], count: int) -> list[int]:
    """Give each piece of work to one of ``count`` workers, so that none has much more than another.

    The dearest first, each to whom has least. Example: ``share_out([1, 4, 3], 2)`` is ``[1, 0, 1]``.
    """
    owners, loads = [0] * len(costs), [0.0] * count
    for piece in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[piece] = loads.index(min(loads))
        loads[owners[piece]] += costs[piece]
    return owners
