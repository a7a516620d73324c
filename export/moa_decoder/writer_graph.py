"""A whole model as one graph, the offline writer of a bundle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from moa_decoder.graph_builder import CONTRIB, GraphBuilder, Port, Positions, Residual, query_growth, rotation_tables
from moa_decoder.matrix import Matrix
from moa_decoder.spec import LayerSpec, Rotary
from moa_decoder.stored_builder import StoredBuilder
from moa_decoder.weights import DecoderWeights

#: Added to scores of what a token does not see.
_UNSEEN = np.float32(-1e9)
#: Positions of the finer table of rotations, and from one row of the coarser table to the next.
_FINE = 256


class WriterGraph:
    """A step of :class:`moa_runtime.backends.base.Backend` by a whole model.

    Args:
        top_k: candidates of each query.
        in_place: whether each layer has caches of its own ``[1, kv_heads, capacity, head_dim]``, inputs
            ``self_keys.N`` and ``self_values.N`` and outputs ``keys.N`` and ``values.N``, which are bound to the same
            memory: new entries are written after the ``S`` cached ones. Otherwise the caches of all layers are the
            inputs and outputs of a step as :class:`moa_runtime.backends.base.StepInputs` has them, and attention is
            made of operators that every engine of a browser has: on WebGPU, onnxruntime's own needs caches in place.
        builder: of its nodes.

    Attributes:
        model: the graph and its constants.
        inputs, outputs: types and shapes by name, in order. Variable sizes have the letters of
            :class:`moa_runtime.backends.base.StepInputs`; ``C`` is a capacity.
    """

    def __init__(
        self, weights: DecoderWeights, *, top_k: int, in_place: bool, builder: type[GraphBuilder] = StoredBuilder
    ) -> None:
        spec = weights.spec
        self._weights, self._spec, self._in_place = weights, spec, in_place
        self._builder = build = builder(spec.epsilon)
        self._positions: dict[Rotary, Positions] = {}
        self._masks: dict[int | None, str] = {}
        candidates = "Q", min(top_k, spec.vocab_size)
        self.inputs: dict[str, Port] = {
            "tokens": (np.int64, "T"),
            "positions": (np.int64, "T"),
            "queries": (np.int64, "Q"),
            **self._caches("self_keys", "S"),
            **self._caches("self_values", "S"),
            "self_mask": (np.bool_, ("T", "S+T")),
        }
        self.outputs: dict[str, Port] = {
            "top_tokens": (np.int64, candidates),
            "top_logprobs": (np.float32, candidates),
            **self._caches("keys", "T"),
            **self._caches("values", "T"),
        }
        self._total = build.op("Shape", "self_mask", start=1, end=2)
        self._lengths = self._of_cached() if in_place else ()
        head = weights.head()
        logprobs = build.op("LogSoftmax", self._logits(self._hidden(head), head), axis=-1)
        build.ops("TopK", logprobs, build.integers(candidates[1]), outputs=["top_logprobs", "top_tokens"])
        self.model = build.model(self.inputs, self.outputs)

    def _of_cached(self) -> tuple[str, str]:
        """Return the inputs of attention that say how many entries there are: int32, less one ``[1]``, and ``[]``."""
        build = self._builder
        total = build.op("Cast", self._total, to=TensorProto.INT32)
        return build.op("Sub", total, build.constant(np.array([1], np.int32))), build.op(
            "Squeeze", total, build.integers(0)
        )

    def _caches(self, name: str, count: str) -> dict[str, Port]:
        """Return the ports of the caches of all layers, or of ``count`` entries."""
        layers = self._spec.layers
        if not self._in_place:
            heads = sum(layer.kv_heads for layer in layers)
            return {name: (np.float32, (count, heads, layers[0].head_dim))}
        shapes = ((1, layer.kv_heads, "C", layer.head_dim) for layer in layers)
        return {f"{name}.{number}": (np.float32, shape) for number, shape in enumerate(shapes)}

    def _hidden(self, head: Matrix) -> str:
        """Normed last hidden states of the queries."""
        build, spec, weights = self._builder, self._spec, self._weights
        x = build.rows(one_of(weights.embedding(), head), "tokens")
        if spec.embedding_scale != 1:
            x = build.op("Mul", x, build.constant(np.float32(spec.embedding_scale)))
        residual, past = Residual(x), self._past()
        entries: list[tuple[str, str]] = []
        for number, layer in enumerate(spec.layers):
            positions = None if layer.rotary is None else self._rotations(layer.rotary)
            factor = 1.0 if self._in_place else layer.attention_scale
            queries, keys, values, residual = build.before_attention(
                residual, layer, weights, number, positions, factor
            )
            new = queries, keys, values
            if self._in_place:
                mixed = self._attention_in_place(new, past[number], layer, number)
            else:
                mixed = self._attention(new, past[number], layer)
            residual = build.after_attention(mixed, residual, layer, weights, number)
            entries.append((keys, values))
        if not self._in_place:
            for name, parts in zip(("keys", "values"), zip(*entries, strict=True), strict=True):
                _, (_, heads, size) = self.outputs[name]
                rows = build.op("Concat", *parts, axis=-1)
                build.op("Reshape", rows, build.integers(-1, int(heads), int(size)), name=name)
        return build.norm(build.op("Gather", build.whole(residual), "queries"), weights.last_norm())

    def _logits(self, hidden: str, head: Matrix) -> str:
        build, spec = self._builder, self._spec
        logits = build.product(hidden, head, self._weights.head_bias() if spec.head_bias else None)
        if spec.logits_scale != 1:
            logits = build.op("Mul", logits, build.constant(np.float32(spec.logits_scale)))
        return build.capped(logits, spec.logits_cap)

    def _past(self) -> Sequence[tuple[str, str]]:
        """Return the layers' cached keys and values: in place ``[1, kv_heads, C, head_dim]``, else ``[kv_heads, S,
        head_dim]``."""
        build, layers = self._builder, self._spec.layers
        if self._in_place:
            return [(f"self_keys.{number}", f"self_values.{number}") for number in range(len(layers))]
        sizes = build.integers(*(layer.kv_heads for layer in layers))
        halves = []
        for name in ("self_keys", "self_values"):
            heads_first = build.op("Transpose", name, perm=[1, 0, 2])
            halves.append(build.ops("Split", heads_first, sizes, outputs=len(layers), axis=0))
        return list(zip(*halves, strict=True))

    def _attention(self, new: Sequence[str], past: tuple[str, str], layer: LayerSpec) -> str:
        build, kv, size, integers = self._builder, layer.kv_heads, layer.head_dim, self._builder.integers
        queries, keys, values = (
            build.op("Transpose", build.op("Reshape", each, integers(-1, heads, size)), perm=[1, 0, 2])
            for each, heads in zip(new, (layer.heads, kv, kv), strict=True)
        )
        keys, values = (
            build.op("Unsqueeze", build.op("Concat", *both, axis=1), integers(1))
            for both in zip(past, (keys, values), strict=True)
        )
        queries = build.op("Reshape", queries, integers(kv, layer.heads // kv, -1, size))
        scores = build.op("MatMul", queries, build.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = build.op("Add", build.capped(scores, layer.attention_cap), self._mask(layer.window))
        mixed = build.op("MatMul", build.op("Softmax", scores, axis=-1), values)
        return build.op("Reshape", build.op("Transpose", mixed, perm=[2, 0, 1, 3]), integers(-1, layer.heads * size))

    def _attention_in_place(self, new: Sequence[str], past: tuple[str, str], layer: LayerSpec, number: int) -> str:
        build = self._builder
        mixed, *_ = build.ops(
            "GroupQueryAttention",
            *(build.op("Unsqueeze", each, build.integers(0)) for each in new),
            *(*past, *self._lengths, "", "", "", self._mask(layer.window)),
            outputs=[f"mixed.{number}", f"keys.{number}", f"values.{number}"],
            domain=CONTRIB,
            num_heads=layer.heads,
            kv_num_heads=layer.kv_heads,
            scale=layer.attention_scale,
            softcap=layer.attention_cap,
        )
        return build.op("Squeeze", mixed, build.integers(0))

    def _mask(self, window: int | None) -> str:
        """Return the mask to add to the scores of a layer, ``[1, 1, T, S+T]``."""
        if window not in self._masks:
            build, seen = self._builder, "self_mask"
            if window is not None:
                seen = build.op("And", seen, build.op("Less", self._distances(), build.integers(window)))
            added = build.op("Where", seen, build.constant(np.float32(0)), build.constant(_UNSEEN))
            self._masks[window] = build.op("Unsqueeze", added, build.integers(0, 1))
        return self._masks[window]

    def _distances(self) -> str:
        """How many positions before each new token each token is, int64 ``[T, S+T]``."""
        build, zero, one = self._builder, *(self._builder.constant(np.int64(number)) for number in (0, 1))
        held = build.op("Squeeze", build.op("Sub", self._total, build.op("Shape", "positions")), build.integers(0))
        every = build.op("Concat", build.op("Range", zero, held, one), "positions", axis=0)
        return build.op("Sub", build.op("Unsqueeze", "positions", build.integers(1)), every)

    def _rotations(self, rotary: Rotary) -> Positions:
        """Cosines and sines of the new tokens' positions.

        Those of ``256 a + b`` follow from those of ``256 a`` and of ``b``, which two small tables have.
        """
        if rotary not in self._positions:
            build, most = self._builder, self._spec.max_context
            parts = []
            for kind, part, places in (
                ("Div", Rotary(rotary.frequencies), np.arange(0, most + 1, _FINE)),
                ("Mod", rotary, np.arange(_FINE)),
            ):
                index = build.op(kind, "positions", build.constant(np.int64(_FINE)))
                tables = rotation_tables(part, places)
                parts.append([build.op("Gather", build.constant(table), index) for table in tables])
            (far_cosines, far_sines), (cosines, sines) = parts
            products = [[build.op("Mul", far, near) for near in (cosines, sines)] for far in (far_cosines, far_sines)]
            (both_cosines, sines_of_near), (sines_of_far, both_sines) = products
            growth = None
            if rotary.query_growth:
                length = rotary.original_context
                turns = build.op("Div", "positions", build.constant(np.int64(length)))
                growth = build.op("Gather", build.constant(query_growth(rotary, np.arange(0, most + 1, length))), turns)
            self._positions[rotary] = Positions(
                build.integers(0),
                build.op("Sub", both_cosines, both_sines),
                build.op("Add", sines_of_far, sines_of_near),
                growth,
            )
        return self._positions[rotary]


def one_of(embedding: Matrix, head: Matrix) -> Matrix:
    """Return the embedding, or ``head`` if it is the same, so that it is stored once."""
    pairs = ((embedding.stored, head.stored), (embedding.scales, head.scales), (embedding.offsets, head.offsets))
    same = all(np.array_equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)
    return head if same and embedding.bits == head.bits else embedding
