"""A decoder-only language model, described by what its layers compute and not by the name of its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions (RoFormer, arXiv 2104.09864) of one kind of layer.

    Of a head's numbers, the first ``2 * len(frequencies)`` are rotated, number ``i`` with ``i + len(frequencies)``; the
    others stay as they are (partial rotation).

    Attributes:
        frequencies: angle of a position's step, float64 ``[rotated numbers / 2]``, with linear, Llama 3 or YaRN scaling
            already applied.
        factor: of cosines and sines (YaRN's attention factor).
        query_growth, original_context: queries at the position ``p`` are multiplied by ``1 + query_growth * log(1 +
            p // original_context)`` (Ministral 3); 0 for no growth.
    """

    frequencies: NDArray[np.float64]
    factor: float = 1.0
    query_growth: float = 0.0
    original_context: int = 1


@dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer computes.

    ``x`` is the residual stream. Attention adds ``residual_scale * after(out(attend(norm(x))))``, the feed-forward adds
    ``residual_scale * after(down(activation(gate(norm(x))) * up(norm(x))))``. ``norm`` is there if ``norms_before``,
    ``after`` if ``norms_after`` (Gemma 2 has both, OLMo 2 only the latter).

    Attributes:
        window: tokens that a token sees, itself included; None for all before it.
        rotary: None for a layer without positions (SmolLM3).
        query_key_norm: RMS norm of queries and keys before rotation: of each head (Qwen 3), of all heads as one vector
            (OLMo 2), or none.
        attention_scale: factor of queries times keys.
        attention_cap: scores become ``cap * tanh(scores / cap)`` (Gemma 2); 0 for none.
        qkv_biases, out_bias, mlp_biases: whether these products have biases.
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: Activation
    attention_scale: float
    rotary: Rotary | None
    window: int | None = None
    norms_before: bool = True
    norms_after: bool = False
    query_key_norm: Literal["none", "head", "whole"] = "none"
    attention_cap: float = 0.0
    residual_scale: float = 1.0
    qkv_biases: bool = False
    out_bias: bool = False
    mlp_biases: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """What a decoder-only model computes: embedding, layers, a last norm, the head.

    Norms are RMS norms: ``x / sqrt(mean(x ** 2) + epsilon) * weight``; sources give ``1 + weight`` where a family wants
    that (Gemma), so graphs need not know.

    Attributes:
        embedding_scale: factor of token embeddings (Gemma, Granite).
        logits_scale: factor of the head's products (Granite, Cohere).
        logits_cap: logits become ``cap * tanh(logits / cap)`` (Gemma 2); 0 for none.
        max_context: positions that the model was made for.
        head_bias: whether the head has a bias.
    """

    vocab_size: int
    hidden_size: int
    epsilon: float
    layers: tuple[LayerSpec, ...]
    max_context: int
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    head_bias: bool = False
