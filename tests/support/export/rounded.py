"""A target in PyTorch with the weights of an offline writer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from moa_decoder.matrix import Matrix
from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import Target
from moa_export.quantize import round_symmetric

_PLACES = {"q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "out": "self_attn.o"} | {
    name: f"mlp.{name}" for name in ("gate", "up", "down")
}


def rounded_model(target: Target, weights: RoundedWeights) -> Any:
    """Return a copy of the target's model that multiplies by what the rounded matrices stand for."""
    model = copy.deepcopy(target.model)
    rounded = {f"{name}.weight": matrix.dense() for name, matrix in _matrices(weights).items()}
    rounded["model.embed_tokens.weight"] = weights.embedding().dense()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in rounded.items()}, strict=False)
    return model


def model_of_integer_products(target: Target, weights: RoundedWeights) -> Any:
    """Return the same with each token's activations rounded to 8 bits before a product, as XNNPACK rounds them.

    Matrices in 8 bits have one scale a row. Scales of 4 bits are bfloat16, and their offsets are multiplied by the
    activations as they were.
    """
    model = rounded_model(target, weights)
    for name, matrix in _matrices(weights).items():
        place, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        setattr(model.get_submodule(place), last, _IntegerProduct(matrix, old.bias))
    return model


class _IntegerProduct(nn.Module):
    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        super().__init__()
        self.bias, self.offsets = bias, None
        if matrix.bits == 4:
            codes, scales = torch.from_numpy(matrix.codes()), torch.from_numpy(matrix.scales).bfloat16()
            scales = scales.repeat_interleave(matrix.group, dim=1)
            if matrix.offsets is not None:
                self.offsets = torch.from_numpy(matrix.offsets).repeat_interleave(matrix.group, dim=1)
        else:
            codes, scales = round_symmetric(torch.from_numpy(matrix.dense()), 8, 0)
        self.weight = codes * scales.float()

    def forward(self, x: Tensor) -> Tensor:
        """``[.., in]`` -> ``[.., out]``."""
        y = nn.functional.linear(rounded_activations(x), self.weight, self.bias)
        return y if self.offsets is None else y + nn.functional.linear(x, self.offsets)


def rounded_activations(x: Tensor) -> Tensor:
    """Round each row to 256 levels between its least and its largest number, one of which is 0."""
    least = x.amin(-1, keepdim=True).clamp(max=0)
    scales = ((x.amax(-1, keepdim=True).clamp(min=0) - least) / 255).clamp(min=torch.finfo(x.dtype).eps)
    zero = -128 - (least / scales).round()
    return ((x / scales).round() + zero).clamp(-128, 127).sub(zero) * scales


def _matrices(weights: RoundedWeights) -> dict[str, Matrix]:
    """Return the matrices of products by the names of the model's layers."""
    layers = {
        f"model.layers.{layer}.{place}_proj": weights.matrix(layer, name)  # type: ignore[arg-type]
        for layer in range(len(weights.spec.layers))
        for name, place in _PLACES.items()
    }
    return {**layers, "lm_head": weights.head()}
