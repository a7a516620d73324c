"""Llama's layers: building blocks of every drafter, and copies of the target's own layers.

Parameter names follow the published checkpoint (``self_attn.q_proj.weight`` and so on). Attention is
written as plain matrix products, which every export target compiles; training uses torch's fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from moa_drafter.config import FitError, LayerDims

KeysValues = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of integer positions ``[T]``: float32 ``[T, 1, head_dim]``, broadcast over heads."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[:, None] / theta ** (steps / head_dim)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to ``x [..., T, heads, head_dim]`` (Llama's half-split layout)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose queries and keys may come from different sequences."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.dims = dims
        q_size, kv_size = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(dims.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(dims.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, dims.hidden_size, bias=False)

    def queries(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Compute rotated queries ``[..., T, num_heads, head_dim]`` of ``x [..., T, hidden]``."""
        q = self.q_proj(x).unflatten(-1, (self.dims.num_heads, self.dims.head_dim))
        return rotate(q, *angles)

    def keys_values(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute rotated keys and plain values, ``[..., S, num_kv_heads, head_dim]``, of ``x [..., S, hidden]``."""
        shape = (self.dims.num_kv_heads, self.dims.head_dim)
        k = self.k_proj(x).unflatten(-1, shape)
        return rotate(k, *angles), self.v_proj(x).unflatten(-1, shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute softmax attention and the output projection, ``[..., T, hidden]``.

        Args:
            q: ``[..., T, num_heads, head_dim]``.
            k, v: ``[..., S, num_kv_heads, head_dim]``.
            mask: boolean ``[T, S]``, true where a query may look, at least once for each; in training, ``q`` has no
                axes before ``T`` then.
        """
        groups = self.dims.num_heads // self.dims.num_kv_heads
        if self.training and mask is not None:  # without a mask, over a token's few layers, it is not faster
            return self.o_proj(_fused(q, k, v, mask, groups).flatten(-2))
        # Heads of one group become extra query rows, so keys and values are never repeated.
        grouped = q.unflatten(-2, (self.dims.num_kv_heads, groups)).movedim(-4, -2)  # [.., KV, G, T, D]
        keys = k.movedim(-3, -1).unsqueeze(-3)  # [.., KV, 1, D, S]
        values = v.movedim(-3, -2).unsqueeze(-3)  # [.., KV, 1, S, D]
        scores = grouped @ keys / math.sqrt(self.dims.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed = scores.float().softmax(dim=-1).to(q.dtype) @ values
        return self.o_proj(mixed.movedim(-2, -4).flatten(-3))


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, groups: int) -> Tensor:
    """Compute softmax attention, shaped like ``q [T, num_heads, head_dim]``, without keeping scores for backward."""
    # With a mask the kernels need equal numbers of query and key heads.
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)[0].transpose(0, 1)


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, dims: LayerDims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.up_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.down_proj = nn.Linear(dims.intermediate_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One Llama decoder layer; callers supply keys and values."""

    def __init__(self, dims: LayerDims, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden_size, eps)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, eps)
        self.mlp = MLP(dims)

    def keys_values(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute keys and values of ``x [..., S, hidden]``, normed first."""
        return self.self_attn.keys_values(self.input_layernorm(x), angles)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Compute the layer's output ``[..., T, hidden]``; ``angles`` are those of ``x``."""
        q = self.self_attn.queries(self.input_layernorm(x), angles)
        x = x + self.self_attn.attend(q, k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def joined(*parts: KeysValues) -> KeysValues:
    """Concatenate keys and values."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


def run_layers(
    layers: Sequence[DecoderLayer],
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    queries: Tensor | None = None,
    past: Sequence[KeysValues] = (),
) -> tuple[Tensor, list[KeysValues]]:
    """Run decoder layers over new tokens, the last layer for ``queries`` alone.

    Args:
        x: ``[T, hidden]``; ``angles`` are those of their positions.
        mask: boolean ``[T, S + T]``, true where a token may look (earlier tokens first).
        queries: indices ``[Q]`` into the new tokens; all when omitted.
        past: each layer's keys and values of ``S`` earlier tokens, ``[S, kv_heads, head_dim]``; none when empty.

    Returns:
        hidden states ``[Q, hidden]``, and each layer's keys and values of the new tokens.
    """
    new = []
    for at, layer in enumerate(layers):
        new.append(layer.keys_values(x, angles))
        keys, values = joined(*past[at : at + 1], new[at])
        if queries is not None and at == len(layers) - 1:
            x, angles, mask = x[queries], (angles[0][queries], angles[1][queries]), mask[queries]
        x = layer(x, keys, values, angles, mask)
    return x, new


@torch.no_grad()
def copy_layer(ours: DecoderLayer, theirs: nn.Module) -> None:
    """Copy the weights of a layer of transformers. Raises FitError if one is missing or has another shape."""
    state = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        found, wanted = tuple(state[name].shape) if name in state else None, tuple(tensor.shape)
        if found != wanted:
            raise FitError(f"the target's layer has {name} of shape {found}, not {wanted}", code="wrong_target")
        tensor.copy_(state[name])


def copy_exactly(ours: Iterable[DecoderLayer], theirs: Iterable[nn.Module]) -> None:
    """Copy the weights of layers that must compute the same. Raises FitError also if the target has more, such as a
    bias."""
    for copy, layer in zip(ours, theirs, strict=True):
        copy_layer(copy, layer)
        if unknown := sorted(layer.state_dict().keys() - copy.state_dict().keys()):
            raise FitError(f"the target's layer has {unknown[0]}, which ours lacks", code="unsupported_target")


def frozen_layers(layers: Sequence[nn.Module], dims: LayerDims, eps: float) -> nn.ModuleList:
    """Copy layers as :func:`copy_exactly` does, with buffers for parameters: neither trained nor part of a
    checkpoint."""
    copies = nn.ModuleList(DecoderLayer(dims, eps) for _ in layers)
    copy_exactly(copies, layers)
    for module in copies.modules():
        for name, tensor in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, tensor.detach(), persistent=False)
    return copies
