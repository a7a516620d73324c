"""The drafter's decoder layers with few large products, for inference.

Weights are copied and packed (:mod:`packed_linear`). Products are computed in a type of one's own choice,
the rest in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moa_drafter.llama import DecoderLayer, KeysValues, rotate
from moa_server.engine.fused_llama import padded
from moa_server.engine.packed_linear import Product, product

#: From rotated queries ``[n, heads, head_dim]`` to what they get, ``[n, heads * head_dim]``.
Attend = Callable[[Tensor], Tensor]


class PackedKeysValues:
    """A decoder layer's keys and values, behind its input norm."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        dims = layer.self_attn.dims
        self._shape, self._dtype, self._norm = (2, dims.num_kv_heads, dims.head_dim), dtype, layer.input_layernorm
        self._both = joined(dtype, layer.self_attn, "k_proj", "v_proj")

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> KeysValues:
        """``x [n, hidden]`` -> rotated keys and plain values, ``[n, kv_heads, head_dim]`` each."""
        keys, values = multiplied(self._both, self._norm(x), self._dtype).unflatten(-1, self._shape).unbind(1)
        return rotate(keys, *angles), values


class PackedLayer:
    """A decoder layer whose keys and values come from elsewhere."""

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        self._dims, self._dtype = layer.self_attn.dims, dtype
        self._queries = joined(dtype, layer.self_attn, "q_proj")
        self._out = joined(dtype, layer.self_attn, "o_proj")
        self._gate_up = joined(dtype, layer.mlp, "gate_proj", "up_proj")
        self._down = joined(dtype, layer.mlp, "down_proj")
        self._before_attention, self._before_mlp = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``x [n, hidden]`` -> ``[n, hidden]``; ``angles`` are the queries'."""
        q = multiplied(self._queries, self._before_attention(x), self._dtype)
        q = rotate(q.unflatten(-1, (self._dims.num_heads, self._dims.head_dim)), *angles)
        x = x + multiplied(self._out, attend(q), self._dtype)
        gate, up = multiplied(self._gate_up, self._before_mlp(x), self._dtype).chunk(2, -1)
        return x + multiplied(self._down, functional.silu(gate) * up, self._dtype)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """``q [B, Q, heads, head_dim]`` attending to ``k, v [B, S, kv_heads, head_dim]`` -> ``[B, Q, heads * head_dim]``.

    Args:
        mask: boolean ``[Q, S]``, true where a query may look; all may look anywhere when omitted.
    """
    count, kv_heads = q.shape[1], k.shape[2]
    # Heads of one group become further queries, so keys and values are never repeated.
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    wide = None if mask is None else mask.repeat(q.shape[2] // kv_heads, 1)
    mixed = functional.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=wide)
    return mixed.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4).flatten(2)


def joined(dtype: torch.dtype, module: nn.Module, *names: str) -> Product:
    """The products with several linear layers of a module as one; they have no biases."""
    return product(torch.cat([module.get_submodule(name).weight.detach().to(dtype) for name in names]))


def multiplied(matrix: Product, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """In float32. The number of rows is padded, see :func:`moa_server.engine.fused_llama.padded`."""
    padding = padded(len(rows)) - len(rows)
    return matrix(functional.pad(rows, (0, 0, 0, padding)).to(dtype))[: len(rows)].float()
