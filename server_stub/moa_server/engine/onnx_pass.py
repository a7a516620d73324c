"""The forward pass on a processor in numpy and onnxruntime, with weights in 4, 8 or 32 bits.

All that lies between the attention of two layers is one graph; rows of all sequences share it. Attention is computed
sequence by sequence (:mod:`moa_server.engine.onnx_attention`). No row depends on the rows beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from moa_decoder.errors import TargetError
from moa_decoder.graph_builder import GraphBuilder, Port, Positions, Residual, query_growth, rotation_tables
from moa_decoder.spec import DecoderSpec, Rotary
from moa_decoder.weights import DecoderWeights
from moa_runtime.options import available_cpus
from moa_runtime.session.tree import depths
from moa_server.engine.base import Float32
from moa_server.engine.onnx_attention import (
    AttentionKind,
    BoundAttention,
    OnnxAttention,
    OnnxCacheShape,
    Tile,
    handle,
    tiles,
)
from moa_server.engine.onnx_sessions import session_options
from moa_server.engine.target_pass import Fusion, Piece, keep_features, rounded_up

#: Rows that the buffers of a pass hold at first.
_FIRST_ROWS = 64
#: Above that, rows are padded to a multiple of this: bindings are kept for each number of rows.
_MANY = 8
#: Threads that build the segments.
_BUILDERS = 2


class OnnxPass:
    """See the module and :class:`moa_server.engine.target_pass.TargetPass`.

    Args:
        weights: are not needed afterwards but for token embeddings.
        threads: that compute; all processors if None.
        fusion: makes the features that caches keep.

    Attributes:
        batch_invariant: False until :mod:`moa_server.engine.invariance` has shown it.
        row_multiple: rows of products are padded to a multiple of this: a single row is multiplied in another way.

    Raises:
        TargetError: ``unsupported_target`` if keys and values of its layers differ in shape.
    """

    name, device, windows, trees = "onnx", "cpu", True, True

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        threads: int | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        spec = weights.spec
        shapes = {(layer.kv_heads, layer.head_dim, layer.heads) for layer in spec.layers}
        if len(shapes) != 1:
            text = "the target's layers differ in the shapes of their keys and values: take another target"
            raise TargetError(text, code="unsupported_target")
        kv_heads, head_dim, _ = next(iter(shapes))
        self.threads = threads or available_cpus()
        self.spec, self._embed = spec, weights.embed
        bits = weights.matrix(0, "gate").bits  # others may have more
        self.dtype = {4: "int4", 8: "int8", 32: "float32"}[bits]
        self._helpers = ThreadPoolExecutor(self.threads - 1, "attention") if self.threads > 1 else None
        self.batch_invariant, self.row_multiple = False, 2
        kept = np.float32 if bits == 32 else np.float16
        self._fusion, size = fusion, 0 if fusion is None else fusion.size
        self.cache_shape = OnnxCacheShape(len(spec.layers), kv_heads, head_dim, kept, size)
        self._rotaries: list[Rotary] = []
        for layer in spec.layers:
            if layer.rotary is not None and layer.rotary not in self._rotaries:
                self._rotaries.append(layer.rotary)
        with ThreadPoolExecutor(min(self.threads, _BUILDERS)) as builders:  # a third quicker with two
            self._segments = list(builders.map(partial(self._segment, weights), range(len(spec.layers) + 1)))
        self._head = self._logits(weights)
        self._kinds = [AttentionKind.of(layer) for layer in spec.layers]
        self._attention = {kind: OnnxAttention(kind, kept) for kind in self._kinds}
        self._buffers = self._new_buffers(_FIRST_ROWS)

    def first_layers(self, count: int) -> OnnxPass:
        """The same with some layers only, for checks that need not run all of them; nothing is copied."""
        shorter = copy.copy(self)
        shorter._segments = [*self._segments[: min(count, len(self._kinds))], self._segments[-1]]
        shorter._fusion = None
        shorter.cache_shape = replace(self.cache_shape, layers=len(shorter._segments) - 1, feature_size=0)
        shorter._buffers = self._new_buffers(_FIRST_ROWS)
        return shorter

    def forward(self, pieces: Sequence[Piece]) -> tuple[Float32, int]:
        """See :meth:`moa_server.engine.target_pass.TargetPass.forward`; always one forward."""
        tokens: list[int] = []
        positions: list[int] = []
        for piece in pieces:
            first = piece.cached + piece.shift
            after = first + len(piece.chain)
            positions += range(first, after)
            positions += [after - 1 + depth for depth in depths(piece.parents)]
            tokens += [*piece.chain, *piece.tree]
        count = len(tokens)
        rows = rounded_up(count, self.row_multiple if count <= _FIRST_ROWS else max(self.row_multiple, _MANY))
        if rows > self._buffers.rows:
            self._buffers = self._new_buffers(rounded_up(rows, 256))
        buffers = self._buffers
        buffers.residuals[0][:count] = self._embed(tokens)
        self._rotate(np.array(positions), count)
        writes, attentions = self._plan(pieces)
        runs = self._bound(rows)
        wanted, inner = () if self._fusion is None else self._fusion.inner_layers, dict[int, Float32]()
        for layer, (session, binding) in enumerate(runs[:-1]):
            session.run_with_iobinding(binding)
            if layer - 1 in wanted:
                inner[layer - 1] = buffers.residuals[layer % 2][:count].copy()
            for keys, new_keys, values, new_values in writes:
                np.copyto(keys[layer], new_keys)
                np.copyto(values[layer], new_values)
            self._attend(attentions[self._kinds[layer]], layer)
        session, binding = runs[-1]
        session.run_with_iobinding(binding)
        hidden = buffers.hidden[:count].copy()
        if self._fusion is not None:
            keep_features(pieces, self._fusion([inner[layer] for layer in wanted]))
        return hidden, 1

    def logits(self, parts: Sequence[Float32]) -> Float32:
        """See :meth:`moa_server.engine.target_pass.TargetPass.logits`."""
        count = sum(len(part) for part in parts)
        hidden = np.zeros((rounded_up(count, self.row_multiple), self.spec.hidden_size), np.float32)
        np.concatenate(list(parts), out=hidden[:count])
        logits: Float32 = self._head.run(["logits"], {"hidden": hidden})[0]
        return logits[:count]

    def _new_buffers(self, rows: int) -> _Buffers:
        return _Buffers(self.spec, self.cache_shape.dtype, self._rotaries, rows)

    def _rotate(self, positions: NDArray[np.int64], count: int) -> None:
        for rotary, (cosines, sines, growth) in zip(self._rotaries, self._buffers.rotations, strict=True):
            cosines[:count], sines[:count] = rotation_tables(rotary, positions)
            if rotary.query_growth:
                growth[:count] = query_growth(rotary, positions)

    def _plan(self, pieces: Sequence[Piece]) -> tuple[list[Any], dict[AttentionKind, list[BoundAttention]]]:
        """Return the copies into caches to make after each layer, and the attention of each kind."""
        buffers, row = self._buffers, 0
        writes: list[Any] = []
        tiled: dict[AttentionKind, list[Tile]] = {kind: [] for kind in self._attention}
        for piece in pieces:
            own = slice(row, row + len(piece))
            writes += piece.cache.writes(piece.cached, buffers.keys[own], buffers.values[own])
            for kind, planned in tiled.items():
                planned += tiles(piece, row, kind.window)
            row += len(piece)
        attentions = {}
        for kind, planned in tiled.items():
            threads = self.threads if len(planned) == 1 else 1
            attentions[kind] = [
                self._attention[kind].bound(tile, buffers.queries, buffers.mixed, threads) for tile in planned
            ]
        return writes, attentions

    def _attend(self, attentions: Sequence[BoundAttention], layer: int) -> None:
        """Compute a layer's attention; several tiles are shared out among the threads."""
        waiting = []
        if len(attentions) > 1 and self._helpers is not None:
            shares = [attentions[start :: self.threads] for start in range(self.threads)]
            waiting = [self._helpers.submit(_attend_all, share, layer) for share in shares[1:] if share]
            attentions = shares[0]
        _attend_all(attentions, layer)
        for each in waiting:
            each.result()

    def _bound(self, rows: int) -> list[tuple[ort.InferenceSession, Any]]:
        """The segments, each with its inputs and outputs bound to the first rows of the buffers."""
        buffers = self._buffers
        if rows not in buffers.bound:
            runs = []
            for index, session in enumerate(self._segments):
                binding = session.io_binding()
                arrays = buffers.of_segment(index)
                for port in session.get_inputs():
                    array = arrays[port.name]
                    given = array[:, :rows] if port.name == "indices" else array[:rows]
                    binding.bind_ortvalue_input(port.name, handle(given))
                for port in session.get_outputs():
                    binding.bind_ortvalue_output(port.name, handle(arrays[port.name][:rows]))
                runs.append((session, binding))
            buffers.bound[rows] = runs
        return buffers.bound[rows]

    def _logits(self, weights: DecoderWeights) -> ort.InferenceSession:
        spec, graph = self.spec, GraphBuilder()
        graph.output("logits", graph.head("hidden", spec, weights))
        outputs: dict[str, Port] = {"logits": (np.float32, ["rows", spec.vocab_size])}
        return graph.session({"hidden": (np.float32, ["rows", spec.hidden_size])}, outputs, self._options())

    def _options(self) -> ort.SessionOptions:
        return session_options(self.threads)

    def _segment(self, weights: DecoderWeights, index: int) -> ort.InferenceSession:
        """What lies between the attention of the layer before ``index`` and that of the layer itself."""
        spec = self.spec
        graph = GraphBuilder(spec.epsilon)
        size = spec.hidden_size
        residual = Residual("residual")
        inputs: dict[str, Port] = {"residual": (np.float32, ["rows", size])}
        if index:
            before = spec.layers[index - 1]
            inputs["mixed"] = (np.float32, ["rows", before.heads * before.head_dim])
            residual = graph.after_attention("mixed", residual, before, weights, index - 1)
        if index == len(spec.layers):
            hidden, _ = graph.residual_norm(residual, weights.last_norm())
            graph.output("hidden", hidden)
            return graph.session(inputs, {"hidden": (np.float32, ["rows", size])}, self._options())
        layer = spec.layers[index]
        positions = None
        if layer.rotary is not None:
            number = self._rotaries.index(layer.rotary)
            names = f"cosines_{number}", f"sines_{number}"
            growth = f"growth_{number}" if layer.rotary.query_growth else None
            positions = Positions("indices", *names, growth)
            half = len(layer.rotary.frequencies)
            inputs |= {"indices": (np.int64, [1, "rows"]), **dict.fromkeys(names, (np.float32, ["rows", half]))}
            if growth:
                inputs[growth] = (np.float32, ["rows", 1])
        queries, keys, values, residual = graph.before_attention(
            residual, layer, weights, index, positions, layer.attention_scale
        )
        kept, of_keys = self.cache_shape.dtype, layer.kv_heads * layer.head_dim
        if kept is np.float16:
            keys, values = (graph.cast(half, np.float16) for half in (keys, values))
        graph.output("queries", queries)
        graph.output("keys", keys)
        graph.output("values", values)
        outputs: dict[str, Port] = {"queries": (np.float32, ["rows", layer.heads * layer.head_dim])}
        outputs |= {"keys": (kept, ["rows", of_keys]), "values": (kept, ["rows", of_keys])}
        if index:
            graph.output("next_residual", graph.whole(residual))
            outputs["next_residual"] = (np.float32, ["rows", size])
        return graph.session(inputs, outputs, self._options())


class _Buffers:
    """Memory of a pass for up to ``rows`` rows, and the segments' bindings to it, by their number of rows.

    Args:
        kept: type of keys and values.
        rotaries: kinds of rotary positions.
    """

    def __init__(self, spec: DecoderSpec, kept: type[np.floating[Any]], rotaries: Sequence[Rotary], rows: int) -> None:
        layer, size = spec.layers[0], spec.hidden_size
        self.rows = rows
        self.residuals = [np.zeros((rows, size), np.float32) for _ in range(2)]
        self.queries, self.mixed = (np.zeros((rows, layer.heads * layer.head_dim), np.float32) for _ in range(2))
        self.keys, self.values = (np.zeros((rows, layer.kv_heads * layer.head_dim), kept) for _ in range(2))
        self.hidden = np.zeros((rows, size), np.float32)
        sizes = [(len(rotary.frequencies),) * 2 + (1,) for rotary in rotaries]
        self.rotations = [[np.zeros((rows, width), np.float32) for width in each] for each in sizes]
        self.bound: dict[int, list[tuple[ort.InferenceSession, Any]]] = {}

    def of_segment(self, index: int) -> dict[str, NDArray[Any]]:
        """Return all inputs and outputs of a segment by name. Two residual streams take turns."""
        arrays: dict[str, NDArray[Any]] = {
            "residual": self.residuals[max(index - 1, 0) % 2],
            "next_residual": self.residuals[index % 2],
            "indices": np.arange(self.rows)[None],
        }
        arrays |= {name: getattr(self, name) for name in ("queries", "mixed", "keys", "values", "hidden")}
        for number, rotation in enumerate(self.rotations):
            arrays |= zip([f"{name}_{number}" for name in ("cosines", "sines", "growth")], rotation, strict=True)
        return arrays


def _attend_all(attentions: Sequence[BoundAttention], layer: int) -> None:
    for attention in attentions:
        attention.attend(layer)
