"""Graphs of products and layers, against numpy."""

from __future__ import annotations

from dataclasses import replace
from math import erf
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from moa_decoder.graph_builder import GraphBuilder, Positions, Residual, query_growth, rotation_tables, scaled
from moa_decoder.spec import DecoderSpec, LayerSpec, Rotary
from support.random_weights import RandomWeights, random_matrix

_ROWS = 5
_ROTARY = Rotary(frequencies=10000.0 ** (-np.arange(8) / 8))
_LLAMA = LayerSpec(4, 2, 16, 96, "silu", 0.25, _ROTARY)
_LAYERS = {
    "llama": _LLAMA,
    "biases": replace(_LLAMA, qkv_biases=True, out_bias=True, mlp_biases=True, residual_scale=0.3),
    "partial": replace(_LLAMA, rotary=Rotary(_ROTARY.frequencies[:4]), activation="gelu_tanh"),
    "growth": replace(_LLAMA, rotary=replace(_ROTARY, query_growth=0.5, original_context=4), activation="gelu"),
    "norms_after": replace(_LLAMA, norms_before=False, norms_after=True, query_key_norm="whole", residual_scale=2.0),
    "head_norm": replace(_LLAMA, norms_after=True, query_key_norm="head", rotary=None),
}


@pytest.mark.parametrize(("bits", "offsets"), [(4, False), (4, True), (8, False), (8, True), (32, False)])
def test_products_are_those_of_the_dense_matrix(bits: int, offsets: bool) -> None:
    rng = np.random.default_rng(bits)
    matrices = [random_matrix(rng, outputs, 64, bits, offsets=offsets) for outputs in (32, 48)]
    biases = [rng.normal(size=outputs).astype(np.float32) for outputs in (32, 48)]
    x = rng.normal(size=(_ROWS, 64)).astype(np.float32)
    builder = GraphBuilder()
    for name, value in zip("ab", builder.products("x", [scaled(each, 3.0) for each in matrices], biases), strict=True):
        builder.output(name, value)
    outputs: dict[str, Any] = {"a": (np.float32, ["rows", 32]), "b": (np.float32, ["rows", 48])}
    session = builder.session({"x": (np.float32, ["rows", 64])}, outputs, ort.SessionOptions())
    for product, matrix, bias in zip(session.run(None, {"x": x}), matrices, biases, strict=True):
        expected = 3 * x @ matrix.dense().T + bias
        assert np.abs(product - expected).max() < (1e-5 if bits == 32 else 0.03) * np.abs(expected).max()


@pytest.mark.parametrize("name", _LAYERS)
def test_a_layer_is_that_of_numpy(name: str) -> None:
    spec = _LAYERS[name]
    weights = RandomWeights(DecoderSpec(32, 64, 1e-5, (spec,), 512))
    rng = np.random.default_rng(1)
    x, mixed = (rng.normal(size=(_ROWS, 64)).astype(np.float32) for _ in range(2))
    at = np.arange(3, 3 + _ROWS)
    builder = GraphBuilder(1e-5)
    positions = Positions("indices", "cosines", "sines", "growth")
    parts = builder.before_attention(Residual("x"), spec, weights, 0, positions, spec.attention_scale)
    residual = builder.after_attention("mixed", parts[3], spec, weights, 0)
    for output, value in zip("qkvx", (*parts[:3], builder.whole(residual)), strict=True):
        builder.output(f"{output}_out", value)
    rotary = spec.rotary or _ROTARY
    cosines, sines = rotation_tables(rotary, at)
    given = {"x": x, "mixed": mixed, "indices": np.arange(_ROWS)[None], "cosines": cosines, "sines": sines}
    given |= {"growth": query_growth(rotary, at)}
    inputs = {key: (value.dtype.type, value.shape) for key, value in given.items()}
    sizes = {"q_out": 64, "k_out": 32, "v_out": 32, "x_out": 64}
    outputs = {key: (np.float32, [_ROWS, size]) for key, size in sizes.items()}
    options = ort.SessionOptions()
    options.log_severity_level = 3  # a layer without positions does not use all inputs
    found = builder.session(inputs, outputs, options).run(None, given)
    for each, expected in zip(found, _layer(spec, weights, x, mixed, at), strict=True):
        assert np.abs(each - expected).max() < 2e-5 * np.abs(expected).max()


def _layer(spec: LayerSpec, weights: RandomWeights, x: Any, mixed: Any, at: Any) -> list[Any]:
    """Queries (scaled), keys, values, and the residual stream after the layer."""

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights.vector(0, name)

    def product(x: Any, name: str, biased: bool) -> Any:
        bias = weights.vector(0, f"{name}_bias") if biased else 0
        return x @ weights.matrix(0, name).dense().T + bias

    def heads(x: Any, name: str) -> Any:
        if spec.query_key_norm == "whole":
            x = norm(x, f"{name}_norm")
        x = x.reshape(len(x), -1, spec.head_dim)
        if spec.query_key_norm == "head":
            x = norm(x, f"{name}_norm")
        if spec.rotary is not None:
            half = len(spec.rotary.frequencies)
            angles = (at[:, None] * spec.rotary.frequencies)[:, None]
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
            x = np.concatenate([*turned, rest], -1)
            if name == "q":
                x = x * (1 + spec.rotary.query_growth * np.log1p(at // spec.rotary.original_context))[:, None, None]
        return x.reshape(len(x), -1)

    def act(x: Any) -> Any:
        if spec.activation == "silu":
            return x / (1 + np.exp(-x))
        if spec.activation == "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2)))

    def after(y: Any, name: str) -> Any:
        return spec.residual_scale * (norm(y, name) if spec.norms_after else y)

    normed = norm(x, "attention_norm") if spec.norms_before else x
    q, k, v = (product(normed, name, spec.qkv_biases) for name in "qkv")
    x = x + after(product(mixed, "out", spec.out_bias), "after_attention_norm")
    normed = norm(x, "mlp_norm") if spec.norms_before else x
    inner = act(product(normed, "gate", spec.mlp_biases)) * product(normed, "up", spec.mlp_biases)
    x = x + after(product(inner, "down", spec.mlp_biases), "after_mlp_norm")
    return [heads(q, "q") * spec.attention_scale, heads(k, "k"), v, x]
