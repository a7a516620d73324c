"""Memory rows on a processor: the drafter's server half in numpy and onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moa_decoder.graph_builder import GraphBuilder, Port, Positions, Residual, rotation_tables
from moa_decoder.matrix import Matrix
from moa_drafter.config import DrafterConfig, Eagle3Config, Reads
from moa_drafter.drafter_layers import DrafterLayer, layer_spec
from moa_drafter.drafter_weights import DrafterWeights
from moa_server.engine.base import Float32, Rows, Span, chunks
from moa_server.engine.onnx_sessions import session_options

#: Rows computed at once; bounds the memory they take.
CHUNK = 512


class RowFunction(Protocol):
    """Computes the rows of ``n`` tokens: keys and values, float32 ``[n, heads, size]`` each."""

    def __call__(self, states: Float32, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """
        Args:
            states: keys and values ``[n, layers, 2 * kv_heads * head_dim]``, or features ``[n, hidden]``.
            positions: of the tokens, ``[n]``.
        """


class OnnxRows:
    """Makes the memory rows of all sequences of a step at once. Implements :class:`moa_server.engine.base.RowMaker`.

    Args:
        reads: states of the target that rows are made of.
    """

    def __init__(self, compute: RowFunction, reads: Reads) -> None:
        self._compute, self._reads = compute, reads

    def of(self, spans: Sequence[Span | None]) -> list[Rows | None]:
        """See :meth:`moa_server.engine.base.RowMaker.of`."""
        found: dict[Span, list[tuple[Float32, Float32]]] = {span: [] for span in spans if span is not None}
        for parts in chunks(list(found), CHUNK):
            states = [self._states(part) for _, part in parts]
            positions = np.concatenate([np.arange(part.start, part.stop) for _, part in parts])
            halves = self._compute(states[0] if len(states) == 1 else np.concatenate(states), positions)
            ends = np.cumsum([part.stop - part.start for _, part in parts])[:-1]
            for (span, _), *both in zip(parts, *(np.split(half, ends) for half in halves), strict=True):
                found[span].append((both[0], both[1]))
        return [None if span is None else _rows(span.start, found[span]) for span in spans]

    def _states(self, span: Span) -> Float32:
        held = span.held
        kv_layers = self._reads.kv_layers
        read = held.read(kv_layers, span.start, span.stop) if kv_layers else held.features[span.start : span.stop]
        states: Float32 = read
        return states


def _rows(start: int, parts: Sequence[tuple[Float32, Float32]]) -> Rows:
    keys, values = (each[0] if len(each) == 1 else np.concatenate(each) for each in zip(*parts, strict=True))
    return Rows(start, keys, values)


def onnx_rows(weights: DrafterWeights, threads: int | None = None) -> OnnxRows | None:
    """Make the rows of a drafter of any architecture; None if it reads nothing of the target.

    Args:
        threads: that compute; all processors if None.
    """
    config = weights.config
    if isinstance(config, DrafterConfig):
        return OnnxRows(ServerHalf(weights, threads), config.row_reads)
    if isinstance(config, Eagle3Config):
        shape = config.row_shape
        return OnnxRows(lambda states, positions: _features(states, shape), config.row_reads)
    return None


def _features(states: Float32, shape: tuple[int, int]) -> tuple[Float32, Float32]:
    """The rows of EAGLE-3: features, cut into halves of ``shape``."""
    first, second = states.reshape(-1, 2, *shape).swapaxes(0, 1)
    return first, second


class ServerHalf:
    """Computes :meth:`moa_drafter.model.MoADrafter.rows`, but for rounding. A :class:`RowFunction`.

    Matrices stay in float32: with 8 bits a row takes 0.14 ms instead of 0.22, which is nothing beside the target's.

    Args:
        weights: of the architecture "moa"; are not needed afterwards.
        threads: that compute; all processors if None.
    """

    def __init__(self, weights: DrafterWeights, threads: int | None = None) -> None:
        config = weights.config
        assert isinstance(config, DrafterConfig)
        self._layers, self._tail = len(config.lsa_layers), len(config.tail_layers)
        spec, inner = (layer_spec(dims, config.rope_theta) for dims in (config.decoder, config.layer_attention))
        self._heads = (spec.kv_heads, spec.head_dim)
        self._rotary = spec.rotary
        assert spec.rotary is not None and inner.rotary is not None
        graph = GraphBuilder(config.rms_norm_eps)
        size, layers = config.target_kv_size, self._layers
        # -- the layer self-attention, [tokens * layers, size]
        x = "states"
        if config.layer_scale:
            x = graph.op("Mul", x, graph.constant(weights.array("layer_scale")))
        x = graph.op("Reshape", x, graph.integers(-1, size))
        own = DrafterLayer(weights, "layer_self_attention")
        places = Positions("depth_indices", "depth_cosines", "depth_sines")
        q, k, v, residual = graph.before_attention(Residual(x), inner, own, 0, places, inner.attention_scale)
        groups, heads, width = inner.heads // inner.kv_heads, inner.kv_heads, inner.head_dim
        q = graph.op("Reshape", q, graph.integers(-1, layers, heads, groups, width))
        q = graph.op(
            "Reshape", graph.op("Transpose", q, perm=[0, 2, 3, 1, 4]), graph.integers(0, heads, groups * layers, width)
        )
        k, v = (graph.op("Reshape", half, graph.integers(-1, layers, heads, width)) for half in (k, v))
        scores = graph.op("MatMul", q, graph.op("Transpose", k, perm=[0, 2, 3, 1]))
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.op("Transpose", v, perm=[0, 2, 1, 3]))
        mixed = graph.op("Reshape", mixed, graph.integers(0, heads, groups, layers, width))
        mixed = graph.op(
            "Reshape", graph.op("Transpose", mixed, perm=[0, 3, 1, 2, 4]), graph.integers(-1, inner.heads * width)
        )
        x = graph.whole(graph.after_attention(mixed, residual, inner, own, 0))
        # -- its mean, and the cross-attention's keys and values of it
        x = graph.op(
            "ReduceMean", graph.op("Reshape", x, graph.integers(-1, layers, size)), graph.integers(1), keepdims=0
        )
        hidden = graph.product(x, Matrix(32, weights.array("Ekv2E.weight")), weights.array("Ekv2E.bias"))
        cross = DrafterLayer(weights, "cross_attention")
        hidden = graph.norm(hidden, cross.vector(0, "attention_norm"))
        keys, values = graph.products(hidden, [cross.matrix(0, "k"), cross.matrix(0, "v")])
        keys = graph.rotary(keys, *self._heads, spec.rotary, Positions("indices", "cosines", "sines"))
        graph.output("keys", keys)
        graph.output("values", values)
        self._depths = rotation_tables(inner.rotary, np.arange(layers))
        inputs: dict[str, Port] = {
            "states": (np.float32, ["tokens", layers, size]),
            **_rotation_ports("", "tokens", spec.head_dim),
            **_rotation_ports("depth_", "all", width),
        }
        port: Port = (np.float32, ["tokens", spec.kv_heads * spec.head_dim])
        self._session = graph.session(inputs, {"keys": port, "values": port}, session_options(threads))

    def __call__(self, states: Float32, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
        """See :class:`RowFunction`."""
        count = len(states)
        assert self._rotary is not None
        fed: dict[str, Any] = {
            "states": states if not self._tail else np.ascontiguousarray(states[:, : self._layers]),
            **_rotation("", *rotation_tables(self._rotary, positions)),
            **_rotation("depth_", *(np.tile(table, (count, 1)) for table in self._depths)),
        }
        keys, values = (half.reshape(count, *self._heads) for half in self._session.run(["keys", "values"], fed))
        if not self._tail:
            return keys, values
        heads, width = self._heads
        tail = states[:, self._layers :].reshape(count, self._tail, 2, heads, width)
        below, above = (tail[:, :, half].reshape(count, self._tail * heads, width) for half in (0, 1))
        return np.concatenate((keys, below), axis=1), np.concatenate((values, above), axis=1)


def _rotation_ports(name: str, rows: str, head_dim: int) -> dict[str, Port]:
    table: Port = (np.float32, [rows, head_dim // 2])
    return {f"{name}indices": (np.int64, [1, rows]), f"{name}cosines": table, f"{name}sines": table}


def _rotation(name: str, cosines: Float32, sines: Float32) -> dict[str, Any]:
    return {f"{name}indices": np.arange(len(cosines))[None], f"{name}cosines": cosines, f"{name}sines": sines}
