"""A recipe's weights as ExecuTorch's partitioners recognise them: torchao's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm

from moa_export.recipe import Recipe, Weights

# Scales fitted by half-quadratic quantisation, as in ExecuTorch's own export of language models
# (``executorch.extension.llm.export.quantize``, 1.5).
_FITTED = IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY
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
    dtype = {4: torch.int4, 8: torch.int8}[weights.bits]
    granularity = PerGroup(weights.group_size) if weights.group_size else PerAxis(0)
    if integer_products:
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=granularity, intx_choose_qparams_algorithm=_FITTED
        )
    else:
        config = IntxWeightOnlyConfig(
            weight_dtype=dtype, granularity=granularity, intx_choose_qparams_algorithm=_FITTED
        )
    quantize_(layer, config)
