"""The device half of a drafter as one ONNX graph, built without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from moa_decoder.graph_builder import GraphBuilder, Port, Positions, Residual, scaled
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.rounded_weights import rounded_between
from moa_decoder.rounding import rounded
from moa_decoder.spec import LayerSpec, Rotary
from moa_decoder.stored_builder import StoredBuilder
from moa_decoder.weights import LayerMatrix, LayerVector, LayerWeights
from moa_drafter.config import DrafterConfig, Eagle3Config
from moa_drafter.drafter_layers import PlacedLayer
from moa_drafter.step_signature import signature
from moa_export.device_parts import DeviceParts
from moa_export.recipe import Recipe, Weights
from moa_runtime.manifest import TensorSpec

_END = np.iinfo(np.int64).max


class DeviceGraph:
    """A step of :class:`moa_runtime.backends.base.Backend` by a drafter, or a pass of an EAGLE-3 head.

    Args:
        builder: of its nodes.

    Attributes:
        model: the graph and its constants.
        inputs, outputs: types and shapes by name, in order, see :func:`moa_drafter.step_signature.signature`.
    """

    def __init__(self, parts: DeviceParts, recipe: Recipe, builder: type[GraphBuilder] = StoredBuilder) -> None:
        self._parts, self._config, self._recipe = parts, parts.config, recipe
        self._build = build = builder(parts.config.rms_norm_eps, integer_products=recipe.activation_bits == 8)
        self._layers = [
            PlacedLayer(spec, _RoundedLayer(weights, recipe.linear), number) for spec, weights, number in parts.layers
        ]
        self.inputs, self.outputs = (_ports(specs) for specs in signature(parts.config, recipe.top_k))
        embedded = build.rows(in_recipe(parts.embedding, recipe.embedding), "tokens")
        if isinstance(parts.config, Eagle3Config):
            hidden = self._eagle3(embedded, parts.config)
        else:
            hidden = self._hidden(embedded)
        logits = build.product(hidden, in_recipe(parts.head, recipe.head))
        indices, logprobs = build.candidates(logits, min(recipe.top_k, len(parts.tokens)))
        build.op("Gather", build.constant(parts.tokens), indices, name="top_tokens")
        build.output("top_logprobs", logprobs)
        self.model: onnx.ModelProto = build.model(self.inputs, self.outputs)

    def _hidden(self, embedded: str) -> str:
        """The normed hidden states that the head reads, of the queries."""
        build, residual, last = self._build, Residual(embedded), len(self._layers) - 1
        crosses = isinstance(self._config, DrafterConfig)
        if crosses and last == 1:  # the other tokens only have to leave their keys and values
            last = 0
        count = len(self._layers) - crosses
        cached = [self._by_layer(f"self_{half}", count) for half in ("keys", "values")]
        rows = [self._by_layer(f"memory_{half}", count) for half in ("keys", "values")] if crosses else []
        new: list[tuple[str, str]] = []
        rotary = self._layers[0].spec.rotary
        assert rotary is not None
        places, mask = self._angles(rotary), "self_mask"
        for number, (spec, weights, index) in enumerate(self._layers):
            normed, residual = build.residual_norm(residual, weights.vector(index, "attention_norm"))
            cross = crosses and number == 1
            if not cross:
                new.append(self._keys_values(normed, spec, weights, index, places))
            if number == last:
                normed = build.op("Gather", normed, "queries")
                residual = Residual(build.op("Gather", build.whole(residual), "queries"))
                places, mask = self._at_queries(places), build.op("Gather", mask, "queries")
            q = build.product(normed, scaled(weights.matrix(index, "q"), spec.attention_scale))
            q = build.rotary(q, spec.heads, spec.head_dim, rotary, places)
            if cross:
                mixed = build.attention(q, spec, [(rows[0][0], rows[1][0])])
            else:
                at = len(new) - 1
                seen = self._joined((cached[0][at], cached[1][at]), new[at])
                if crosses and number:
                    seen = self._behind_rows((rows[0][at], rows[1][at]), seen)
                mixed = build.attention(q, spec, [seen], mask)
            residual = build.after_attention(mixed, residual, spec, weights, index)
        for name, halves in zip(("keys", "values"), zip(*new, strict=True), strict=True):
            build.output(name, halves[0] if len(halves) == 1 else build.op("Concat", *halves, axis=1))
        if self._parts.norm is None:
            return build.whole(residual)
        return build.residual_norm(residual, self._parts.norm)[0]

    def _eagle3(self, embedded: str, config: Eagle3Config) -> str:
        """The normed estimates that the head reads, of the queries."""
        build, drafter = self._build, self._parts.drafter
        ((spec, weights, index),) = self._layers
        places = self._angles(config.rotary)
        features = build.norm("features", drafter.array("layer.hidden_norm.weight"))
        x = build.op("Concat", build.norm(embedded, weights.vector(index, "attention_norm")), features, axis=-1)
        norms = [drafter.array(f"layer.self_attn.{name}.weight") for name in ("q_norm", "k_norm") if config.qk_norm]
        own = self._keys_values(x, spec, weights, index, places, config.rotary, *norms[1:])
        x, places = build.op("Gather", x, "queries"), self._at_queries(places)
        # The norm's weight takes the scale of attention, or the matrix.
        q = build.product(x, scaled(weights.matrix(index, "q"), 1.0 if norms else spec.attention_scale))
        if norms:
            q = build.heads_norm(q, spec, spec.heads, norms[0] * np.float32(spec.attention_scale))
        q = build.rotary(q, spec.heads, spec.head_dim, config.rotary, places)
        mask = build.op("Gather", "self_mask", "queries")
        mixed = build.attention(q, spec, [self._joined(("self_keys", "self_values"), own)], mask)
        before = build.op("Gather", features if config.norm_before_residual else "features", "queries")
        residual = build.after_attention(mixed, Residual(before), spec, weights, index)
        for name, value in zip(("keys", "values"), own, strict=True):
            build.output(name, value)
        assert self._parts.norm is not None
        normed, residual = build.residual_norm(residual, self._parts.norm)
        build.output("estimates", normed if config.norm_output else build.whole(residual))
        return normed

    def _keys_values(
        self,
        x: str,
        spec: LayerSpec,
        weights: LayerWeights,
        index: int,
        places: Positions,
        rotary: Rotary | None = None,
        norm: Float32 | None = None,
    ) -> tuple[str, str]:
        """Keys and values of the new tokens, ``[T, kv_heads, head_dim]``."""
        build, rotary = self._build, rotary or spec.rotary
        assert rotary is not None
        keys, values = build.products(x, [weights.matrix(index, "k"), weights.matrix(index, "v")])
        if norm is not None:
            keys = build.heads_norm(keys, spec, spec.kv_heads, norm)
        keys = build.rotary(keys, spec.kv_heads, spec.head_dim, rotary, places)
        shape = build.integers(-1, spec.kv_heads, spec.head_dim)
        return build.op("Reshape", keys, shape), build.op("Reshape", values, shape)

    def _angles(self, rotary: Rotary) -> Positions:
        """Cosines and sines of the new tokens' positions."""
        build = self._build
        positions = build.op("Unsqueeze", build.cast("positions", np.float32), build.integers(1))
        angles = build.op("Mul", positions, build.constant(rotary.frequencies.astype(np.float32)))
        tables = [build.op(kind, angles) for kind in ("Cos", "Sin")]
        if rotary.factor != 1:
            factor = build.constant(np.float32(rotary.factor))
            tables = [build.op("Mul", table, factor) for table in tables]
        return Positions(build.integers(0), *tables)

    def _at_queries(self, places: Positions) -> Positions:
        tables = (self._build.op("Gather", table, "queries") for table in (places.cosines, places.sines))
        return Positions(places.indices, *tables)

    def _by_layer(self, name: str, count: int) -> Sequence[str]:
        """Split ``[n, layers * heads, head_dim]`` into ``[n, heads, head_dim]`` for each layer."""
        if count == 1:
            return [name]
        build = self._build
        sizes = build.integers(*[self._layers[0].spec.kv_heads] * count)
        return build.ops("Split", name, sizes, outputs=count, axis=1)

    def _joined(self, *parts: tuple[str, str]) -> tuple[str, str]:
        """Join keys and values: a product with an empty cache ends the process in onnxruntime before 1.32."""
        keys, values = (self._build.op("Concat", *half, axis=0) for half in zip(*parts, strict=True))
        return keys, values

    def _behind_rows(self, rows: tuple[str, str], own: tuple[str, str]) -> tuple[str, str]:
        """Put memory rows in place of the first tokens. Without any there is one of zeros, which is left out, because a
        key of zeros would still take its share of attention."""
        build = self._build
        first = build.op("Gather", "memory_keys", build.constant(np.int64(0)), axis=0)
        largest = build.op("ReduceMax", build.op("Abs", first), keepdims=0)
        given = build.op("Greater", largest, build.constant(np.float32(0)))
        count = build.op("Shape", "memory_keys", start=0, end=1)
        zero, one, end = (build.integers(number) for number in (0, 1, _END))
        halves = []
        for half, whole in zip(rows, own, strict=True):
            kept = build.op("Where", given, half, build.op("Slice", whole, zero, one, zero))
            halves.append(build.op("Concat", kept, build.op("Slice", whole, count, end, zero), axis=0))
        return halves[0], halves[1]


def in_recipe(dense: Float32, weights: Weights) -> Matrix:
    """Round a matrix ``[out, in]`` as a recipe says."""
    if not weights.is_integer:
        return Matrix(32, dense.astype(np.float16).astype(np.float32) if weights.bits == 16 else dense)
    group = weights.group_size or dense.shape[1]
    return rounded(dense, weights.bits, group) if weights.symmetric else rounded_between(dense, weights.bits, group)


class _RoundedLayer:
    """The layer of other weights, rounded as a recipe says."""

    def __init__(self, weights: LayerWeights, rounding: Weights) -> None:
        self._weights, self._rounding = weights, rounding

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        return in_recipe(self._weights.matrix(layer, name).dense(), self._rounding)

    def vector(self, layer: int, name: LayerVector) -> NDArray[np.float32]:
        return self._weights.vector(layer, name)


def _ports(specs: Sequence[TensorSpec]) -> dict[str, Port]:
    return {spec.name: (np.dtype(spec.dtype).type, spec.shape) for spec in specs}
