"""Decoder layers of a drafter's device half, as :mod:`moa_decoder` describes layers: its own, and the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moa_decoder.matrix import GROUP, Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.spec import LayerSpec, Rotary
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector, LayerWeights
from moa_drafter.config import (
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    FitError,
    IndependentConfig,
    LayerDims,
    RivalConfig,
)

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


class TensorSource(Protocol):
    """The tensors of a checkpoint, see :class:`moa_drafter.drafter_weights.DrafterWeights`."""

    def array(self, name: str) -> NDArray[Any]: ...


class DrafterLayer:
    """One decoder layer. Implements :class:`moa_decoder.weights.LayerWeights`, whatever the layer's number.

    Args:
        name: of the layer in the checkpoint.
        bits: of the matrices, see :func:`in_bits`.
    """

    def __init__(self, weights: TensorSource, name: str, bits: int = 32) -> None:
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


def layer_names(config: DrafterConfig | RivalConfig) -> dict[str, int | None]:
    """Return the layers of a device half in order: their names in checkpoints, and the target's layer for those that
    are its own, counted from 0."""
    if isinstance(config, DrafterConfig):
        tail = {f"tail.{n}": None if config.trained_target_layers else at for n, at in enumerate(config.tail_layers)}
        return {"self_attention": None, "cross_attention": None, **tail}
    if isinstance(config, EarlyExitConfig):
        return {**{f"below.{n}": n for n in range(config.exit_layer)}, "exit": None}
    if isinstance(config, IndependentConfig):
        return {f"layers.{n}": None for n in range(config.layers)}
    assert isinstance(config, Eagle3Config)
    return {"layer": None}


def device_layers(
    config: DrafterConfig | RivalConfig, drafter: TensorSource, target: DecoderWeights, bits: int = 32
) -> list[PlacedLayer]:
    """Return the layers of a device half in order.

    Args:
        bits: of the drafter's own matrices; the target's have their own.

    Raises:
        FitError: layers of the target compute something else than the drafter was trained with.
    """
    spec = layer_spec(config.decoder, config.rope_theta)
    layers = []
    for name, number in layer_names(config).items():
        if number is None:
            layers.append(PlacedLayer(spec, DrafterLayer(drafter, name, bits)))
        else:
            _check_copied(target.spec.layers[number], spec)
            layers.append(PlacedLayer(spec, target, number))
    return layers


def last_norm(config: DrafterConfig | RivalConfig, drafter: TensorSource) -> Float32 | None:
    """Return the weight of the norm before the head; None if there is no norm."""
    if isinstance(config, DrafterConfig) and not config.final_norm:
        return None
    weight: Float32 = drafter.array("norm.weight")
    return weight


def _check_copied(theirs: LayerSpec, ours: LayerSpec) -> None:
    """Raise FitError if a layer of the target does not compute what the drafter was trained with."""
    same = replace(theirs, rotary=None) == replace(ours, rotary=None)
    if not same or not _rotates_alike(theirs.rotary, ours.rotary):
        text = "the drafter has copies of its target's layers, and those of this target compute something else"
        raise FitError(f"{text}: take the target that it was trained for", code="wrong_target")


def _rotates_alike(one: Rotary | None, other: Rotary | None) -> bool:
    if one is None or other is None or len(one.frequencies) != len(other.frequencies):
        return one is other
    close = np.allclose(one.frequencies, other.frequencies, rtol=1e-6, atol=0)
    return close and (one.factor, one.query_growth) == (other.factor, other.query_growth)
