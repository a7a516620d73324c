"""The device half as one stateless module with the signature of ``moa_runtime.backends.base.Backend.step``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_runtime.bundle import TensorSpec


def signature(config: DrafterConfig, top_k: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the device half, in order.

    Sizes that vary: ``T`` tokens, ``Q`` queries, ``S`` cached tokens, ``M`` memory rows.
    """
    kv = (config.kv_heads, config.decoder.head_dim)
    top_k = min(top_k, config.draft_vocab_size)
    inputs = (
        TensorSpec("tokens", "int64", ("T",)),
        TensorSpec("positions", "int64", ("T",)),
        TensorSpec("queries", "int64", ("Q",)),
        TensorSpec("self_keys", "float32", ("S", *kv)),
        TensorSpec("self_values", "float32", ("S", *kv)),
        TensorSpec("self_mask", "bool", ("T", "S+T")),
        TensorSpec("memory_keys", "float32", ("M", *kv)),
        TensorSpec("memory_values", "float32", ("M", *kv)),
    )
    outputs = (
        TensorSpec("top_tokens", "int64", ("Q", top_k)),
        TensorSpec("top_logprobs", "float32", ("Q", top_k)),
        TensorSpec("keys", "float32", ("T", *kv)),
        TensorSpec("values", "float32", ("T", *kv)),
    )
    return inputs, outputs


class DeviceHalf(nn.Module):
    """One drafting step; caches are inputs and outputs, so the module has no state.

    The layers are the drafter's own modules. Only the embedding may differ.

    Args:
        drafter: bound to its target.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``; the drafter's own in float32 when omitted.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, *, top_k: int, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.embed = drafter.embed if embed is None else embed

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        queries: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        self_mask: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See ``Backend.step`` for the inputs.

        Returns:
            ``top_tokens`` int64 ``[Q, K]`` and ``top_logprobs`` float32 ``[Q, K]``, best first;
            ``keys`` and ``values`` float32 ``[T, kv_heads, head_dim]``.
        """
        # Tells the exporter how the sizes depend on each other; it cannot guess "cached + new".
        torch._check(self_mask.shape[0] == tokens.shape[0])
        torch._check(self_mask.shape[1] == self_keys.shape[0] + tokens.shape[0])
        heads = self.drafter.config.decoder.num_kv_heads
        hidden, new = self.drafter.draft(
            self.embed(tokens),
            self.drafter.angles(positions),
            queries,
            self_mask,
            memory=_by_layer(memory_keys, memory_values, heads),
            memory_mask=None,
            tail_mask=tail_mask(self_mask, memory_keys),
            cached=_by_layer(self_keys, self_values, heads),
        )
        keys, values = new[0] if len(new) == 1 else (torch.cat(part, dim=1) for part in zip(*new, strict=True))
        return *self.drafter.candidates(hidden, self.top_k), keys, values


def tail_mask(self_mask: Tensor, memory_keys: Tensor) -> Tensor:
    """Where tokens may look in the target's own layers: at every memory row, and at tokens that have none.

    A token with a row has what the target computed; what the device computed for it is not looked at. A single row
    of zeros stands for none at all (see ``MoaDrafter``), and a key of zeros would still take its share of the
    attention, so it is not looked at either.

    Args:
        self_mask: ``[T, S + T]``; its column ``i`` is the token at position ``i``, or drafted in a tree.
        memory_keys: ``[M, kv_heads, head_dim]``, of positions ``0..M-1``.

    Returns:
        boolean ``[T, M + S + T]``.
    """
    given = memory_keys[0].ne(0).any()
    rows = given.expand(self_mask.shape[0], memory_keys.shape[0])
    behind = torch.arange(self_mask.shape[1], device=self_mask.device) >= memory_keys.shape[0]
    return torch.cat((rows, self_mask & (behind | ~given)), dim=1)


def _by_layer(keys: Tensor, values: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """``[n, layers * heads, head_dim]`` -> for each layer ``[n, heads, head_dim]``."""
    if keys.shape[1] == heads:  # a split in one is a copy of the whole cache in some runtimes
        return [(keys, values)]
    return list(zip(keys.split(heads, dim=1), values.split(heads, dim=1), strict=True))
