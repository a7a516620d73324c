"""The offline writer as a MIL program in float16, built from the model's description, for iOS 18 and macOS 15.

Each layer has states of its own, ``self_keys_N`` and ``self_values_N``, ``[1, KV, C, D]``. Matrices keep the codes and
scales of the description; what 4 bits have besides, an offset for each group, is multiplied by the groups' sums. See
:mod:`moa_export.targets.coreml_program` for what a device can take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 - its customary name
from coremltools.converters.mil.mil import Function, Program, types

from moa_decoder.graph_builder import query_growth, rotation_tables
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.spec import LayerSpec, Rotary
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector
from moa_decoder.writer_graph import one_of
from moa_export.errors import ExportError
from moa_export.targets.coreml_program import (
    EXTEND_SIZE,
    FUNCTIONS,
    STEP_SIZES,
    Float16,
    Linear,
    Norm,
    Var,
    rotate,
    shared_constant,
    take_rows,
)

#: The functions of the program and what they are for: a drafter's, but for its memory rows.
WRITER_FUNCTIONS = {name: purpose for name, purpose in FUNCTIONS.items() if name.startswith(("step", "extend"))}


def writer_program(weights: DecoderWeights, capacity: int, top_k: int) -> Program:
    """Functions that share weights and states, those of :data:`WRITER_FUNCTIONS`.

    Args:
        capacity: ``C``.

    Raises:
        ExportError: layers see only the last tokens, or rotate a part of a head.
    """
    network = _Network(weights, capacity, min(top_k, weights.spec.vocab_size))
    program = Program()
    for size in STEP_SIZES:
        program.add_function(f"step_{size}", network.function(size, predicts=True))
    program.add_function(f"extend_{EXTEND_SIZE}", network.function(EXTEND_SIZE, predicts=False))
    program.default_function_name = next(iter(WRITER_FUNCTIONS))
    program.export_as_multifunction = True
    return program


class _Network:
    """The model's weights, and the functions that use them.

    Args:
        capacity: ``C``.
    """

    def __init__(self, weights: DecoderWeights, capacity: int, top_k: int) -> None:
        self._spec = spec = weights.spec
        self._capacity, self._top_k = capacity, top_k
        if any(layer.window is not None and layer.window < capacity for layer in spec.layers):
            raise ExportError("coreml writes models whose layers see all tokens only", code="unsupported_writer")
        head = weights.head()
        table = one_of(weights.embedding(), head)
        self._embed = _embedding("head" if table is head else "embedding", table, spec.embedding_scale)
        kinds = dict.fromkeys(layer.rotary for layer in spec.layers if layer.rotary is not None)
        rotations = {rotary: _Rotation(f"rotation_{number}", rotary, capacity) for number, rotary in enumerate(kinds)}
        self._layers = [
            _Layer(layer, weights, at, None if layer.rotary is None else rotations[layer.rotary])
            for at, layer in enumerate(spec.layers)
        ]
        self._norm = _norm("norm", weights.last_norm(), spec.epsilon)
        self._head = _product("head", head, weights.head_bias() if spec.head_bias else None)

    def function(self, size: int, *, predicts: bool) -> Function:
        """Append ``size`` tokens at a slot of the caches, and predict what follows each if it ``predicts``."""
        states = {
            f"self_{name}_{at}": mb.state_tensor_placeholder(
                (1, layer.kv_heads, self._capacity, layer.head_dim), types.fp16
            )
            for name in ("keys", "values")
            for at, layer in enumerate(self._spec.layers)
        }
        given = {name: mb.TensorSpec((size,), types.int32) for name in ("tokens", "positions")}
        given["slot"] = mb.TensorSpec((1,), types.int32)
        given["self_mask"] = mb.TensorSpec((size, self._capacity), types.fp16)
        mb.name_count.clear()  # names must not depend on earlier programs
        with Function({**given, **states}, opset_version=ct.target.iOS18) as function:
            function.set_outputs(list(self._body(function.inputs, size, predicts=predicts)))
        return function

    def _body(self, inputs: dict[str, Var], size: int, *, predicts: bool) -> Sequence[Var]:
        x = self._embed(inputs["tokens"])
        begin = mb.concat(values=[np.zeros(2, np.int32), inputs["slot"], np.zeros(1, np.int32)], axis=0)
        end = mb.add(x=begin, y=np.array([0, 0, size, 0], np.int32))
        for at, layer in enumerate(self._layers):
            states = inputs[f"self_keys_{at}"], inputs[f"self_values_{at}"]
            x = layer(x, inputs["positions"], inputs["self_mask"], states, (begin, end))
        if not predicts:
            return [mb.add(x=inputs["slot"], y=np.int32(size), name="next_slot")]
        spec = self._spec
        logits = _capped(_times(self._head(self._norm(x)), spec.logits_scale), spec.logits_cap)
        top, indices = mb.topk(x=logits, k=self._top_k, axis=-1, ascending=False)
        total = mb.reduce_log_sum_exp(x=mb.cast(x=logits, dtype="fp32"), axes=[-1], keep_dims=True)
        tokens = mb.add(x=indices, y=np.int32(0), name="top_tokens")
        return tokens, mb.sub(x=mb.cast(x=top, dtype="fp32"), y=total, name="top_logprobs")


class _Rotation:
    """Tables of a kind of rotary positions, which its layers share.

    Args:
        name: of the tables in the program.
        capacity: positions.
    """

    def __init__(self, name: str, rotary: Rotary, capacity: int) -> None:
        positions = np.arange(capacity)
        self.size, self._name = 2 * len(rotary.frequencies), name
        self._cosines, self._sines = (table.astype(np.float16)[:, None] for table in rotation_tables(rotary, positions))
        growth = query_growth(rotary, positions) if rotary.query_growth else None
        self._growth = None if growth is None else growth.astype(np.float16)[:, None]

    def __call__(self, x: Var, positions: Var) -> Var:
        """Turn the heads ``[T, heads, D]``."""
        return rotate(x, self._taken("cosines", self._cosines, positions), self._taken("sines", self._sines, positions))

    def grown(self, queries: Var, positions: Var) -> Var:
        """Scale queries ``[T, heads, D]`` by their positions, if this kind does."""
        if self._growth is None:
            return queries
        return mb.mul(x=queries, y=self._taken("growth", self._growth, positions))

    def _taken(self, kind: str, table: Float16, positions: Var) -> Var:
        return take_rows(shared_constant(f"{self._name}_{kind}", table), positions)


class _Layer:
    """A decoder layer, see :class:`moa_decoder.spec.LayerSpec`."""

    def __init__(self, spec: LayerSpec, weights: DecoderWeights, at: int, rotation: _Rotation | None) -> None:
        self._spec, self._rotation = spec, rotation
        if rotation is not None and rotation.size != spec.head_dim:
            raise ExportError("coreml writes models that rotate whole heads only", code="unsupported_writer")

        def product(name: LayerMatrix, bias: LayerVector, biased: bool) -> Linear:
            return _product(f"{name}_{at}", weights.matrix(at, name), weights.vector(at, bias) if biased else None)

        def norm(name: LayerVector, there: bool) -> Callable[[Var], Var]:
            return _norm(f"{name}_{at}", weights.vector(at, name), weights.spec.epsilon) if there else lambda x: x

        self._q = product("q", "q_bias", spec.qkv_biases)
        self._k = product("k", "k_bias", spec.qkv_biases)
        self._v = product("v", "v_bias", spec.qkv_biases)
        self._out = product("out", "out_bias", spec.out_bias)
        self._gate = product("gate", "gate_bias", spec.mlp_biases)
        self._up = product("up", "up_bias", spec.mlp_biases)
        self._down = product("down", "down_bias", spec.mlp_biases)
        self._before = [norm(name, spec.norms_before) for name in ("attention_norm", "mlp_norm")]
        self._after = [norm(name, spec.norms_after) for name in ("after_attention_norm", "after_mlp_norm")]
        self._heads_norms = [norm(name, spec.query_key_norm != "none") for name in ("q_norm", "k_norm")]

    def __call__(self, x: Var, positions: Var, mask: Var, states: tuple[Var, Var], place: tuple[Var, Var]) -> Var:
        """Write the new entries at ``place`` of the states; residual stream ``[T, hidden]`` -> the next one."""
        spec = self._spec
        normed = self._before[0](x)
        queries = self._split(self._q(normed), spec.heads, self._heads_norms[0])
        keys = self._split(self._k(normed), spec.kv_heads, self._heads_norms[1])
        if self._rotation is not None:
            queries = self._rotation.grown(self._rotation(queries, positions), positions)
            keys = self._rotation(keys, positions)
        values = mb.reshape(x=self._v(normed), shape=[x.shape[0], spec.kv_heads, spec.head_dim])
        cached = [_stored(state, new, place) for state, new in zip(states, (keys, values), strict=True)]
        mixed = self._attend(queries, *cached, mask)
        x = mb.add(x=x, y=_times(self._after[0](self._out(mixed)), spec.residual_scale))
        normed = self._before[1](x)
        inner = mb.mul(x=self._activated(self._gate(normed)), y=self._up(normed))
        return mb.add(x=x, y=_times(self._after[1](self._down(inner)), spec.residual_scale))

    def _split(self, rows: Var, heads: int, norm: Callable[[Var], Var]) -> Var:
        shape = [rows.shape[0], heads, self._spec.head_dim]
        if self._spec.query_key_norm == "whole":
            return mb.reshape(x=norm(rows), shape=shape)
        return norm(mb.reshape(x=rows, shape=shape))

    def _attend(self, queries: Var, keys: Var, values: Var, mask: Var) -> Var:
        """``queries [T, heads, D]``, ``keys`` and ``values [1, KV, C, D]`` -> ``[T, heads * D]``."""
        spec, tokens = self._spec, queries.shape[0]
        groups = spec.heads // spec.kv_heads
        q = mb.mul(x=queries, y=np.float16(spec.attention_scale))
        q = mb.transpose(x=mb.reshape(x=q, shape=[tokens, spec.kv_heads, groups, spec.head_dim]), perm=[1, 2, 0, 3])
        q = mb.reshape(x=q, shape=[1, spec.kv_heads, groups * tokens, spec.head_dim])
        mask = mb.tile(x=mask, reps=[groups, 1])
        scores = mb.add(x=_capped(mb.matmul(x=q, y=keys, transpose_y=True), spec.attention_cap), y=mask)
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=values)
        mixed = mb.reshape(x=mixed, shape=[spec.kv_heads, groups, tokens, spec.head_dim])
        return mb.reshape(x=mb.transpose(x=mixed, perm=[2, 0, 1, 3]), shape=[tokens, spec.heads * spec.head_dim])

    def _activated(self, x: Var) -> Var:
        kind = self._spec.activation
        if kind == "silu":
            return mb.silu(x=x)
        return mb.gelu(x=x, mode="TANH_APPROXIMATION" if kind == "gelu_tanh" else "EXACT")


def _stored(state: Var, new: Var, place: tuple[Var, Var]) -> Var:
    """Write ``new [T, KV, D]`` into a state ``[1, KV, C, D]``; return the state."""
    update = mb.expand_dims(x=mb.transpose(x=new, perm=[1, 0, 2]), axes=[0])
    whole = [True, True, False, True]
    begin, end = place
    changed = mb.slice_update(
        x=mb.read_state(input=state), update=update, begin=begin, end=end, begin_mask=whole, end_mask=whole
    )
    return mb.coreml_update_state(state=state, value=changed)


def _norm(name: str, weight: Float32, epsilon: float) -> Norm:
    return Norm(name, weight.astype(np.float16), epsilon)


def _times(x: Var, factor: float) -> Var:
    return x if factor == 1 else mb.mul(x=x, y=np.float16(factor))


def _capped(x: Var, cap: float) -> Var:
    """``cap * tanh(x / cap)``; ``x`` itself for a cap of 0."""
    return mb.mul(x=mb.tanh(x=mb.mul(x=x, y=np.float16(1 / cap))), y=np.float16(cap)) if cap else x


def _product(name: str, matrix: Matrix, bias: Float32 | None) -> Linear:
    """``[rows, inputs] -> [rows, outputs]``."""
    scales, offsets = matrix.scales, matrix.offsets

    def multiply(x: Var) -> Var:
        if scales is None:
            y = mb.linear(x=x, weight=shared_constant(name, matrix.stored.astype(np.float16)))
        else:
            codes = matrix.codes()
            data = codes.astype(types.nptype_from_builtin(types.int4)) if matrix.bits == 4 else codes
            weight = mb.constexpr_blockwise_shift_scale(
                data=shared_constant(f"{name}_codes", data),
                scale=shared_constant(f"{name}_scales", scales.astype(np.float16)),
            )
            y = mb.linear(x=x, weight=weight)
        if offsets is not None:
            groups = mb.reshape(x=x, shape=[x.shape[0], matrix.inputs // matrix.group, matrix.group])
            sums = mb.reduce_sum(x=groups, axes=[-1], keep_dims=False)
            y = mb.add(x=y, y=mb.linear(x=sums, weight=shared_constant(f"{name}_offsets", offsets.astype(np.float16))))
        return y if bias is None else mb.add(x=y, y=shared_constant(f"{name}_bias", bias.astype(np.float16)))

    return multiply


def _embedding(name: str, matrix: Matrix, factor: float) -> Callable[[Var], Var]:
    """int32 ``[T]`` -> float16 ``[T, inputs]``."""

    def take(tokens: Var) -> Var:
        if matrix.scales is None:
            return _times(take_rows(shared_constant(f"{name}_rows", matrix.stored.astype(np.float16)), tokens), factor)
        # In 8 bits these are the constants of a head that is the same matrix.
        stored = shared_constant(f"{name}_{'codes' if matrix.bits == 8 else 'rows'}", matrix.codes())
        codes = mb.cast(x=take_rows(stored, tokens), dtype="fp16")
        count, groups = tokens.shape[0], matrix.inputs // matrix.group
        x = mb.reshape(x=codes, shape=[count, groups, matrix.group])
        scales = take_rows(shared_constant(f"{name}_scales", matrix.scales.astype(np.float16)), tokens)
        x = mb.mul(x=x, y=mb.expand_dims(x=scales, axes=[2]))
        if matrix.offsets is not None:
            offsets = take_rows(shared_constant(f"{name}_offsets", matrix.offsets.astype(np.float16)), tokens)
            x = mb.add(x=x, y=mb.expand_dims(x=offsets, axes=[2]))
        return _times(mb.reshape(x=x, shape=[count, matrix.inputs]), factor)

    return take
