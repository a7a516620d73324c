"""Decoder layers of a drafter's checkpoint, as :mod:`moa_decoder` describes layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moa_decoder.matrix import GROUP, Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.spec import LayerSpec, Rotary
from moa_decoder.weights import LayerMatrix, LayerVector, LayerWeights
from moa_drafter.config import LayerDims
from moa_drafter.drafter_weights import DrafterWeights

_MATRICES: Mapping[LayerMatrix, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_VECTORS: Mapping[LayerVector, str] = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


class DrafterLayer:
    """One decoder layer. Implements :class:`moa_decoder.weights.LayerWeights`, whatever the layer's number.

    Args:
        name: of the layer in the checkpoint.
        bits: of the matrices, see :func:`in_bits`.
    """

    def __init__(self, weights: DrafterWeights, name: str, bits: int = 32) -> None:
        self._weights, self._name, self._bits = weights, name, bits

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        return in_bits(self._weights.array(f"{self._name}.{_MATRICES[name]}.weight"), self._bits)

    def vector(self, layer: int, name: LayerVector) -> Float32:
        numbers: Float32 = self._weights.array(f"{self._name}.{_VECTORS[name]}.weight")
        return numbers


class PlacedLayer(NamedTuple):
    """The layer ``number`` of some weights, with its description."""

    spec: LayerSpec
    weights: LayerWeights
    number: int = 0


def in_bits(matrix: Float32, bits: int) -> Matrix:
    """Round a matrix; it stays as it is if groups do not divide its inputs."""
    return rounded(matrix, bits if matrix.shape[1] % GROUP == 0 else 32)


def layer_spec(dims: LayerDims, theta: float) -> LayerSpec:
    """Describe one of Llama's layers."""
    steps = np.arange(0, dims.head_dim, 2)
    return LayerSpec(
        dims.num_heads,
        dims.num_kv_heads,
        dims.head_dim,
        dims.intermediate_size,
        "silu",
        dims.head_dim**-0.5,
        Rotary(theta ** -(steps / dims.head_dim)),
    )
