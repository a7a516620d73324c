"""A drafter that looks at tokens alone as one stateless module: :meth:`moa_runtime.backends.base.Backend.step` without
memory rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moa_drafter.architectures.tokens import TokenDrafter
from moa_drafter.llama import run_layers


class TokenHalf(nn.Module):
    """One step; caches are inputs and outputs. A cache entry holds the keys, or the values, of all layers, one layer's
    heads after the other's.

    Args:
        drafter: bound to its target.
        top_k: candidates per query, at most the draft vocabulary.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``; the drafter's own in float32 when omitted.
    """

    def __init__(self, drafter: TokenDrafter, *, top_k: int, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.embed = drafter.embed if embed is None else embed
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.layers = list(drafter.device_layers)
        self.kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`~moa_runtime.backends.base.StepInputs`; the exporter takes the inputs' names from here.

        Returns:
            see :class:`~moa_runtime.backends.base.StepResult`.
        """
        # Tells the exporter how the sizes depend on each other; it cannot guess "cached + new".
        torch._check(self_mask.shape[0] == tokens.shape[0])
        torch._check(self_mask.shape[1] == self_keys.shape[0] + tokens.shape[0])
        heads = self.drafter.config.decoder.num_kv_heads
        past = list(zip(self_keys.split(heads, dim=1), self_values.split(heads, dim=1), strict=True))
        x, angles = self.embed(tokens), self.drafter.angles(positions)
        hidden, new = run_layers(self.layers, x, angles, self_mask, queries, past)
        keys, values = (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return *self.drafter.candidates(self.drafter.norm(hidden), self.top_k), keys, values
