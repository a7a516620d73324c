"""Drafters that look at the tokens alone, behind the runtime's backend contract: its loop drafts with them too."""

from __future__ import annotations

import torch

from moa_drafter.architectures.tokens import TokenDrafter
from moa_drafter.token_half import TokenHalf
from moa_runtime.backends.base import Backend, StepInputs, StepResult


class TokenBackend(Backend):
    """In PyTorch, float32. Memory rows are not looked at.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    needs_a_row = False

    def __init__(self, drafter: TokenDrafter, *, top_k: int) -> None:
        self._half = TokenHalf(drafter, top_k=top_k)

    @property
    def top_k(self) -> int:
        return self._half.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._half.kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        given = {name: torch.from_numpy(array) for name, array in inputs.of_tokens().items()}
        return StepResult(*(out.numpy() for out in self._half(**given)))
