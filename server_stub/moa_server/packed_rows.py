"""The drafter's server half with few large products: on a small target it is most of what drafting adds to a step."""

from __future__ import annotations

import torch
from torch import Tensor

from moa_drafter.llama import KeysValues, rotary_angles, rotate
from moa_drafter.model import MoADrafter
from moa_drafter.states import TargetStates
from moa_server.packed_layer import PackedLayer, attended, joined, multiplied
from moa_server.packed_linear import product


class PackedRows:
    """Computes :meth:`moa_drafter.model.MoADrafter.rows`, but for rounding.

    Args:
        drafter: without layers of the target; its weights are copied.
        dtype: of the products.
    """

    def __init__(self, drafter: MoADrafter, dtype: torch.dtype) -> None:
        config, dims = drafter.config, drafter.config.layer_attention
        lsa, self._dtype = drafter.layer_self_attention, dtype
        self._heads, self._size = dims.num_kv_heads, dims.head_dim
        self._scale = drafter.layer_scale.detach() if config.layer_scale else None
        self._lsa, self._lsa_keys_values = PackedLayer(lsa, dtype), joined(dtype, lsa.self_attn, "k_proj", "v_proj")
        bias = drafter.Ekv2E.bias.detach().to(dtype)
        self._to_hidden = product(drafter.Ekv2E.weight.detach().to(dtype), bias)
        self._cross_norm = drafter.cross_attention.input_layernorm
        self._keys_values = joined(dtype, drafter.cross_attention.self_attn, "k_proj", "v_proj")
        self._row_shape = (2, config.decoder.num_kv_heads, config.decoder.head_dim)
        self._angles = drafter.angles
        layers = torch.arange(len(config.lsa_layers), device=bias.device)
        self._layer_angles = rotary_angles(layers, dims.head_dim, config.rope_theta)

    @torch.inference_mode()
    def __call__(self, states: TargetStates, positions: Tensor) -> KeysValues:
        """See :meth:`moa_drafter.drafter.Drafter.rows`."""
        tokens, layers, _ = states.kv.shape
        x = states.kv if self._scale is None else states.kv * self._scale
        x = x.flatten(0, 1)
        both = multiplied(self._lsa_keys_values, self._lsa.before_attention(x), self._dtype)
        keys, values = both.view(tokens, layers, 2, self._heads, self._size).unbind(2)
        keys = rotate(keys, *self._layer_angles)
        angles = tuple(part.repeat(tokens, 1, 1) for part in self._layer_angles)
        x = self._lsa(x, angles, lambda q: attended(q.unflatten(0, (tokens, layers)), keys, values).flatten(0, 1))
        hidden = multiplied(self._to_hidden, x.unflatten(0, (tokens, layers)).mean(1), self._dtype)
        both = multiplied(self._keys_values, self._cross_norm(hidden), self._dtype).unflatten(-1, self._row_shape)
        return rotate(both[:, 0], *self._angles(positions)), both[:, 1]
