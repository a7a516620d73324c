"""The device half as the two methods of an ExecuTorch program, in operators that one delegate can take whole.

The network is the drafter's own, with a rotated residual stream, written so that XNNPACK's partitioner finds no reason
to cut the graph. Its rules (``executorch.backends.xnnpack.partition.config``, 1.5) refuse means over the last axis,
and slices of tensors whose size varies; both are written as products with constant matrices. Only the
first and last parts stay outside: the embedding, and the choice of the best candidates.

Two methods, because the self-attention is the first layer: what it keeps of a token depends on that token alone. So
``extend`` makes cache entries of many tokens at the price of two small products each, and only the tokens whose
successors are wanted go through ``draft``.

Sizes: ``T`` tokens, ``Q`` queries, ``S`` positions of the self-attention's cache, ``M`` memory rows, ``KV`` key-value
heads, ``G`` query heads for each of them, ``D`` numbers a head, ``K`` candidates.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor

from moa_decoder.matrix import Float32
from moa_drafter.config import DrafterConfig
from moa_drafter.llama import Attention, DecoderLayer, RMSNorm
from moa_drafter.model import MoADrafter
from moa_export.quantize import QuantisedEmbedding
from moa_export.targets.base import Specs
from moa_runtime.manifest import TensorSpec

#: Tokens of one call of ``extend``, and queries of one call of ``draft``, at most.
MOST_TOKENS, MOST_QUERIES = 512, 16


def signatures(config: DrafterConfig, top_k: int) -> dict[str, tuple[Specs, Specs]]:
    """Return inputs and outputs of each method, in order."""
    kv = (config.decoder.num_kv_heads, config.decoder.head_dim)
    top_k = min(top_k, config.draft_vocab_size)
    return {
        "extend": (
            (TensorSpec("tokens", "int64", ("T",)), TensorSpec("positions", "int64", ("T",))),
            (TensorSpec("keys", "float32", ("T", *kv)), TensorSpec("values", "float32", ("T", *kv))),
        ),
        "draft": (
            (
                TensorSpec("tokens", "int64", ("Q",)),
                TensorSpec("positions", "int64", ("Q",)),
                TensorSpec("self_mask", "float32", ("Q", "S")),
                TensorSpec("self_keys", "float32", ("S", *kv)),
                TensorSpec("self_values", "float32", ("S", *kv)),
                TensorSpec("memory_keys", "float32", ("M", *kv)),
                TensorSpec("memory_values", "float32", ("M", *kv)),
            ),
            (TensorSpec("top_tokens", "int64", ("Q", top_k)), TensorSpec("top_logprobs", "float32", ("Q", top_k))),
        ),
    }


class Extend(nn.Module):
    """Cache entries of tokens.

    Args:
        drafter: see :func:`~moa_export.quarot.rotate_residual_stream`.
        embed: token ids ``[T]`` to float32 ``[T, hidden]``.
    """

    def __init__(self, drafter: MoADrafter, embed: nn.Module) -> None:
        super().__init__()
        layer = drafter.self_attention
        self.dims = layer.self_attn.dims
        self.embed, self.angles = embed, Angles(drafter)
        self.norm, self.rotary = Norm.of(layer.input_layernorm), Rotary(self.dims.head_dim)
        self.k_proj, self.v_proj = layer.self_attn.k_proj, layer.self_attn.v_proj

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[T]`` each -> rotated keys and plain values, float32 ``[T, KV, D]`` each."""
        shape = (-1, 1, self.dims.num_kv_heads, self.dims.head_dim)
        x = self.norm(self.embed(tokens))
        keys = self.rotary(self.k_proj(x).view(shape), self.angles(positions))
        return keys.view(shape[0], *shape[2:]), self.v_proj(x).view(shape[0], *shape[2:])


class Draft(nn.Module):
    """Candidates for what follows each query.

    Args:
        drafter: see :func:`~moa_export.quarot.rotate_residual_stream`.
        embed: token ids ``[Q]`` to float32 ``[Q, hidden]``.
        top_k: candidates per query, at most the draft vocabulary.
    """

    draft_to_target: Tensor

    def __init__(self, drafter: MoADrafter, embed: nn.Module, *, top_k: int) -> None:
        super().__init__()
        self.embed, self.angles = embed, Angles(drafter)
        self.self_attention = Layer(drafter.self_attention)
        self.cross_attention = Layer(drafter.cross_attention)
        self.norm = Norm.of(drafter.norm) if isinstance(drafter.norm, RMSNorm) else nn.Identity()
        self.head = linear(drafter.head)
        self.register_buffer("draft_to_target", drafter.draft_to_target)
        self.top_k = min(top_k, drafter.config.draft_vocab_size)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        self_mask: Tensor,
        self_keys: Tensor,
        self_values: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            tokens, positions: int64 ``[Q]``.
            self_mask: float32 ``[Q, S]``, added to the scores: 0 where a query may look, -10000 elsewhere.
            self_keys, self_values: cache entries of earlier tokens and of the queries, float32 ``[S, KV, D]``.
            memory_keys, memory_values: float32 ``[M, KV, D]``.

        Returns:
            ``top_tokens`` int64 and ``top_logprobs`` float32, ``[Q, K]`` each, best first.
        """
        angles = self.angles(positions)
        x = self.self_attention(self.embed(tokens), angles, self_keys, self_values, self_mask)
        x = self.cross_attention(x, angles, memory_keys, memory_values)
        logits = self.head(self.norm(x))
        top, index = logits.topk(self.top_k, dim=-1)
        # The normaliser from the best candidate alone: one delegated softmax in place of a logsumexp, which none takes.
        best = logits.softmax(dim=-1).gather(-1, index[:, :1]).log()
        return self.draft_to_target[index], best + (top - top[:, :1])


class Layer(nn.Module):
    """A decoder layer whose keys and values come from outside."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.input_norm, self.mlp_norm = Norm.of(layer.input_layernorm), Norm.of(layer.post_attention_layernorm)
        self.attention = GroupedAttention(layer.self_attn)
        self.mlp = layer.mlp

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """``x [Q, hidden]`` attending to ``keys``, ``values [S, KV, D]`` -> ``[Q, hidden]``."""
        x = x + self.attention(self.input_norm(x), angles, keys, values, mask)
        return x + self.mlp(self.mlp_norm(x))


class GroupedAttention(nn.Module):
    """Grouped-query attention as one batched product for each key-value head."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.dims = attention.dims
        # The scale of the scores goes into the queries' weights.
        self.q_proj = linear(attention.q_proj.weight / math.sqrt(self.dims.head_dim))
        self.o_proj = attention.o_proj
        self.rotary = Rotary(self.dims.head_dim)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """``x [Q, hidden]`` attending to ``keys``, ``values [S, KV, D]``; ``mask [Q, S]`` is added to the scores."""
        heads, size = self.dims.num_kv_heads, self.dims.head_dim
        groups = self.dims.num_heads // heads
        q = self.rotary(self.q_proj(x).view(-1, heads, groups, size), angles)
        # The query heads that share a key are stacked as rows, so that keys are never repeated.
        scores = torch.bmm(q.permute(1, 2, 0, 3).reshape(heads, -1, size), keys.permute(1, 2, 0))  # [KV, G * Q, S]
        if mask is not None:
            scores = scores + torch.cat([mask] * groups)
        mixed = torch.bmm(scores.softmax(dim=-1), values.permute(1, 0, 2))
        return self.o_proj(mixed.view(heads, groups, -1, size).permute(2, 0, 1, 3).reshape(-1, heads * groups * size))


class Embedding(nn.Module):
    """The table of a :class:`QuantisedEmbedding`, widened in floating point: operators on
    integers are taken by no delegate."""

    rows: Tensor
    scales: Tensor

    def __init__(self, table: QuantisedEmbedding) -> None:
        super().__init__()
        self.bits, self.group = table.bits, table.group
        self.register_buffer("rows", table.rows)
        self.register_buffer("scales", table.scales)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, hidden]``."""
        codes = self.rows[tokens].float()
        if self.bits == 4:
            high = (codes * 0.0625).floor()
            codes = torch.cat((codes - 16.0 * high, high), dim=1) - 8.0
        groups = self.scales.shape[1]
        scales = self.scales[tokens].float().view(-1, groups, 1)
        return (codes.view(-1, groups, self.group) * scales).view(-1, groups * self.group)


class FloatEmbedding(nn.Module):
    """A table of float32."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, hidden]``."""
        return self.table[tokens]


class Norm(nn.Module):
    """Root-mean-square norm over the last axis, without weights."""

    mean: Tensor
    eps: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, size), 1 / size))
        self.register_buffer("eps", torch.tensor([eps]))

    @classmethod
    def of(cls, norm: RMSNorm) -> Norm:
        """Make that of a module whose weights are in the matrices that follow it."""
        if not torch.equal(norm.weight, torch.ones_like(norm.weight)):
            raise ValueError("a norm has weights of its own: rotate_residual_stream moves them into the matrices")
        return cls(norm.weight.numel(), norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(nn.functional.linear(x * x, self.mean, self.eps))


class Angles(nn.Module):
    """Cosines and sines of the rotary embedding."""

    periods: Tensor

    def __init__(self, drafter: MoADrafter) -> None:
        super().__init__()
        size = drafter.config.decoder.head_dim
        steps = torch.arange(0, size, 2, dtype=torch.float32).repeat(2)
        self.register_buffer("periods", drafter.config.rope_theta ** (steps / size))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[T]`` -> float32 ``[T, 1, 1, D]`` each."""
        angles = positions.float().view(-1, 1, 1, 1) / self.periods
        return angles.cos(), angles.sin()


class Rotary(nn.Module):
    """Rotary positions in Llama's half-split layout, of the first ``rotated`` numbers of a head if not of all."""

    quarter_turn: Tensor

    def __init__(self, head_dim: int, rotated: int | None = None) -> None:
        super().__init__()
        half = (rotated or head_dim) // 2
        turn, numbers = torch.zeros(head_dim, head_dim), torch.arange(half)
        turn[numbers, half + numbers], turn[half + numbers, numbers] = -1, 1  # (first, second) to (-second, first)
        self.register_buffer("quarter_turn", turn)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``x [T, .., .., D]``, ``angles`` of :class:`Angles`."""
        cos, sin = angles
        return x * cos + nn.functional.linear(x, self.quarter_turn) * sin


def integer_weight(codes: Tensor, scales: Tensor, bits: int, *, integer_products: bool = True) -> Tensor:
    """Weights of a linear layer in 4 or 8 bits.

    Args:
        codes: int8 ``[out, in]``, around 0.
        scales: ``[out, groups]``.
        integer_products: whether activations are rounded to 8 bits too, so that products run in integers.
    """
    weight: Tensor = IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=scales.float(),
        zero_point=torch.zeros_like(scales, dtype=torch.int8),
        target_dtype={4: torch.int4, 8: torch.int8}[bits],
        block_size=(1, codes.shape[1] // scales.shape[1]),
        dtype=torch.float32,
        activation_quantization="int8_asym_per_token" if integer_products else None,
    )
    return weight


def linear(weight: Tensor, bias: Float32 | None = None) -> nn.Linear:
    """A linear layer that holds ``weight [out, in]`` and ``bias [out]``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(torch.from_numpy(np.array(bias)), requires_grad=False)
    return layer
