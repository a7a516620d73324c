"""Drafters that look at the tokens alone, behind the runtime's backend contract: its loop drafts with them too."""

from __future__ import annotations

import torch

from moa_drafter.rivals.tokens import TokenDrafter, run_layers
from moa_runtime.backends.base import Backend, StepInputs, StepResult


class TokenBackend(Backend):
    """In PyTorch, float32. Memory rows are not looked at.

    A cache entry holds the keys, or the values, of all layers, one layer's heads after the other's.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    needs_a_row = False

    def __init__(self, drafter: TokenDrafter, *, top_k: int) -> None:
        self._drafter = drafter
        self._heads, self._head_dim = drafter.config.decoder.num_kv_heads, drafter.config.decoder.head_dim
        self._layers = drafter.stack()
        self._top_k = min(top_k, drafter.config.draft_vocab_size)

    @property
    def top_k(self) -> int:
        return self._top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return len(self._layers) * self._heads, self._head_dim

    @property
    def max_positions(self) -> None:
        return None

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        cached = (torch.from_numpy(part) for part in (inputs.self_keys, inputs.self_values))
        past = zip(*(part.split(self._heads, dim=1) for part in cached), strict=True)
        hidden, new = run_layers(
            self._layers,
            self._drafter.embed(torch.from_numpy(inputs.tokens)),
            self._drafter.angles(torch.from_numpy(inputs.positions)),
            torch.from_numpy(inputs.self_mask),
            torch.from_numpy(inputs.queries),
            list(past),
        )
        top, logprobs = self._drafter.candidates(self._drafter.norm(hidden), self._top_k)
        keys, values = (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return StepResult(*(out.numpy() for out in (top, logprobs, keys, values)))
