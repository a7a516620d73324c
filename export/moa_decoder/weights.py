"""The contract between sources of weights (GGUF, safetensors) and builders of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from moa_decoder.matrix import Float32, Matrix
from moa_decoder.spec import DecoderSpec, LayerSpec

#: Matrices of a layer: ``[outputs, inputs]``; queries and keys have their numbers in the order of
#: :class:`moa_decoder.spec.Rotary`.
LayerMatrix = Literal["q", "k", "v", "out", "gate", "up", "down"]
#: Vectors of a layer: weights of norms, and biases.
LayerVector = Literal[
    "attention_norm",
    "mlp_norm",
    "after_attention_norm",
    "after_mlp_norm",
    "q_norm",
    "k_norm",
    "q_bias",
    "k_bias",
    "v_bias",
    "out_bias",
    "gate_bias",
    "up_bias",
    "down_bias",
]


class LayerWeights(Protocol):
    """The weights of decoder layers. Nothing is read before it is asked for."""

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix: ...

    def vector(self, layer: int, name: LayerVector) -> Float32:
        """One that the layer's :class:`moa_decoder.spec.LayerSpec` says is there."""


class DecoderWeights(LayerWeights, Protocol):
    """The weights of one model."""

    @property
    def spec(self) -> DecoderSpec: ...

    def head(self) -> Matrix:
        """``[vocab_size, hidden_size]``; without ``logits_scale``."""

    def head_bias(self) -> Float32: ...

    def last_norm(self) -> Float32: ...

    def embedding(self) -> Matrix:
        """``[vocab_size, hidden_size]``; without ``embedding_scale``."""

    def embed(self, tokens: Sequence[int]) -> Float32:
        """Token embeddings, float32 ``[n, hidden_size]``, multiplied by ``embedding_scale``."""


def shapes_of(layer: LayerSpec, hidden_size: int) -> dict[LayerMatrix | LayerVector, tuple[int, ...]]:
    """Return the shapes of a layer's matrices and vectors, by name."""
    queries, keys, wide = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.intermediate_size
    shapes: dict[LayerMatrix | LayerVector, tuple[int, ...]] = {
        "q": (queries, hidden_size),
        "k": (keys, hidden_size),
        "v": (keys, hidden_size),
        "out": (hidden_size, queries),
        "gate": (wide, hidden_size),
        "up": (wide, hidden_size),
        "down": (hidden_size, wide),
    }
    if layer.norms_before:
        shapes |= {"attention_norm": (hidden_size,), "mlp_norm": (hidden_size,)}
    if layer.norms_after:
        shapes |= {"after_attention_norm": (hidden_size,), "after_mlp_norm": (hidden_size,)}
    if layer.query_key_norm == "head":
        shapes |= {"q_norm": (layer.head_dim,), "k_norm": (layer.head_dim,)}
    elif layer.query_key_norm == "whole":
        shapes |= {"q_norm": (queries,), "k_norm": (keys,)}
    if layer.qkv_biases:
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if layer.out_bias:
        shapes["out_bias"] = (hidden_size,)
    if layer.mlp_biases:
        shapes |= {"gate_bias": (wide,), "up_bias": (wide,), "down_bias": (hidden_size,)}
    return shapes
