"""The contract between sources of weights (GGUF, safetensors) and builders of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from moa_decoder.matrix import Float32, Matrix
from moa_decoder.spec import DecoderSpec

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


class DecoderWeights(Protocol):
    """The weights of one model. Nothing is read before it is asked for."""

    @property
    def spec(self) -> DecoderSpec: ...

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix: ...

    def vector(self, layer: int, name: LayerVector) -> Float32:
        """One that the layer's :class:`moa_decoder.spec.LayerSpec` says is there."""

    def head(self) -> Matrix:
        """``[vocab_size, hidden_size]``; without ``logits_scale``."""

    def head_bias(self) -> Float32: ...

    def last_norm(self) -> Float32: ...

    def embed(self, tokens: Sequence[int]) -> Float32:
        """Token embeddings, float32 ``[n, hidden_size]``, multiplied by ``embedding_scale``."""
