"""A recipe's weights as ExecuTorch's partitioners recognise them: torchao's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor

from moa_export.quantize import round_symmetric
from moa_export.recipe import Recipe, Weights

_HEAD = "head"


def round_weights(method: nn.Module, recipe: Recipe, *, integer_products: bool) -> list[dict[str, Any]]:
    """Quantise the linear layers of a method in place; the one it calls ``head`` is the draft head.

    Args:
        integer_products: whether activations are rounded to 8 bits too, so that products run in integers.

    Returns:
        every product with stored weights: its name, inputs ``k``, outputs ``n``, ``bits`` and ``group_size``.
    """
    products = []
    for name, layer in method.named_modules():
        if isinstance(layer, nn.Linear):
            weights = recipe.head if name == _HEAD else recipe.linear
            round_layer(layer, weights, integer_products=integer_products)
            sizes = {"k": layer.in_features, "n": layer.out_features}
            products.append({"name": name, **sizes, "bits": weights.bits, "group_size": weights.group_size})
    return products


def round_layer(layer: nn.Linear, weights: Weights, *, integer_products: bool) -> None:
    """Quantise one linear layer in place; float weights stay as they are."""
    if not weights.is_integer:
        return
    codes, scales = round_symmetric(layer.weight, weights.bits, weights.group_size)
    rounded = IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=scales.float(),
        zero_point=torch.zeros_like(scales, dtype=torch.int8),
        target_dtype={4: torch.int4, 8: torch.int8}[weights.bits],
        block_size=(1, weights.group_size or layer.in_features),
        dtype=torch.float32,
        activation_quantization="int8_asym_per_token" if integer_products else None,
    )
    layer.weight = nn.Parameter(rounded, requires_grad=False)
