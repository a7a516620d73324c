"""The drafter's server half with few large products: on a small target it is most of what drafting adds to a step."""

from __future__ import annotations

import torch
from torch import Tensor

from moa_drafter.llama import KeysValues, rotary_angles
from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_server.drafting.packed_layer import PackedKeysValues, PackedLayer, attended, multiplied
from moa_server.engine.packed_linear import product


class PackedRows:
    """Computes :meth:`moa_drafter.model.MoADrafter.rows`, but for rounding.

    Args:
        drafter: its weights are copied.
        dtype: of the products.
    """

    def __init__(self, drafter: MoADrafter, dtype: torch.dtype) -> None:
        config, dims = drafter.config, drafter.config.layer_attention
        lsa, self._dtype = drafter.layer_self_attention, dtype
        self._scale = drafter.layer_scale.detach() if config.layer_scale else None
        self._lsa, self._lsa_keys_values = PackedLayer(lsa, dtype), PackedKeysValues(lsa, dtype)
        bias = drafter.Ekv2E.bias.detach().to(dtype)
        self._to_hidden = product(drafter.Ekv2E.weight.detach().to(dtype), bias)
        self._keys_values = PackedKeysValues(drafter.cross_attention, dtype)
        self._tail_shape = (len(config.tail_layers), 2, config.decoder.num_kv_heads, config.decoder.head_dim)
        self._angles, self._layers = drafter.angles, len(config.lsa_layers)
        layers = torch.arange(self._layers, device=bias.device)
        self._layer_angles = rotary_angles(layers, dims.head_dim, config.rope_theta)

    @torch.inference_mode()
    def __call__(self, states: TargetStates, positions: Tensor) -> KeysValues:
        """See :meth:`moa_drafter.drafter.Drafter.rows`."""
        seen, tail = states.kv[:, : self._layers], states.kv[:, self._layers :]
        cut = (len(seen), self._layers)
        x = (seen if self._scale is None else seen * self._scale).flatten(0, 1)
        cos, sin = (part.repeat(len(seen), 1, 1) for part in self._layer_angles)
        keys, values = (part.unflatten(0, cut) for part in self._lsa_keys_values(x, (cos, sin)))
        x = self._lsa(x, (cos, sin), lambda q: attended(q.unflatten(0, cut), keys, values).flatten(0, 1))
        hidden = multiplied(self._to_hidden, x.unflatten(0, cut).mean(1), self._dtype)
        keys, values = self._keys_values(hidden, self._angles(positions))
        if not self._tail_shape[0]:
            return keys, values
        tail_keys, tail_values = (part.flatten(1, 2) for part in tail.view(-1, *self._tail_shape).float().unbind(2))
        return torch.cat((keys, tail_keys), dim=1), torch.cat((values, tail_values), dim=1)
