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
    kv = (config.decoder.num_kv_heads, config.decoder.head_dim)
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


class QuantisedEmbedding(nn.Module):
    """An int8 embedding table with one scale per token; only the rows asked for are widened."""

    rows: Tensor
    scales: Tensor

    def __init__(self, table: Tensor) -> None:
        """``table [vocab_size, hidden]``, float."""
        super().__init__()
        scales = table.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("rows", (table.float() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, hidden]``."""
        return self.rows[tokens].float() * self.scales[tokens]


class DeviceHalf(nn.Module):
    """One drafting step; caches are inputs and outputs, so the module has no state.

    The layers are the drafter's own modules. Only the embedding differs: the drafter's in float32, or a
    :class:`QuantisedEmbedding`.

    Args:
        drafter: bound to its target.
        embedding_bits: 32 or 8.
        top_k: candidates per query, at most the draft vocabulary.
    """

    def __init__(self, drafter: MoADrafter, *, embedding_bits: int, top_k: int) -> None:
        super().__init__()
        self.drafter = drafter
        self.top_k = min(top_k, drafter.config.draft_vocab_size)
        self.embed = QuantisedEmbedding(drafter.embedding) if embedding_bits == 8 else drafter.embed

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
        x = self.embed(tokens)
        cos, sin = self.drafter.angles(positions)
        keys, values = self.drafter.self_attention.keys_values(x, (cos, sin))
        self_kv = torch.cat((self_keys, keys)), torch.cat((self_values, values))
        hidden = self.drafter.draft_hidden(
            x[queries],
            (cos[queries], sin[queries]),
            self_kv,
            (memory_keys, memory_values),
            self_mask[queries],
        )
        logits = self.drafter.logits(hidden)
        top, index = logits.topk(self.top_k, dim=-1)
        logprobs = top - logits.logsumexp(dim=-1, keepdim=True)
        return self.drafter.draft_to_target[index], logprobs, keys, values
