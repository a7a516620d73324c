"""The device half as MIL programs, in float16: what Core ML calls the functions of a model.

The graph is written here rather than traced, because what a device can take decides most of it: fixed sizes,
caches of a fixed capacity, float16 throughout. The comparison with PyTorch after each export keeps this second
description of the network true to the first.

Sizes: ``T`` tokens of one call, ``C`` positions that a cache holds, ``KV`` key-value heads, ``D`` numbers a
head, ``K`` candidates. Caches are ``[1, KV, C, D]``; rank 4 and a last axis that is a multiple of 32 are what
the Neural Engine takes for states (github.com/apple/coremltools/issues/2553 and 2631), and so are pieces of at
most 32 positions written at once (github.com/Anemll/Anemll/issues/27).

Attention is two products and a softmax. The fused operator of iOS 18 gives wrong numbers in quantised models on iOS 26
(github.com/pytorch/executorch/pull/16144) and crashes on some processors with more than one query
(github.com/kasper0406/stablehlo-coreml/pull/89). The query heads that share a key are stacked as rows, so that keys are
never repeated and no leading axis comes near 10: if a GPU fuses the pattern again, it computes larger batches wrongly
(github.com/apple/coremltools/issues/2650).

Weights are rounded once and written once: constants with the same ``weight_id`` become one entry of ``weight.bin``,
which all functions of a program share. The operator set fixes the oldest system that loads a package, and the form:

========  =============================================  ==================================================
bits      iOS 18, macOS 15                               iOS 17, macOS 14
========  =============================================  ==================================================
16        float16                                        float16
8         ``constexpr_blockwise_shift_scale``            ``constexpr_affine_dequantize``, one scale a row
4         ``constexpr_blockwise_shift_scale``            ``constexpr_lut_to_dense``, 64 values a matrix, and one
                                                         scale a row, multiplied in after the product
========  =============================================  ==================================================

Embedding tables use no ``constexpr`` operator: a device may expand the whole table to float16 (57 MB for the default
target), and models that gather from one gave wrong numbers on iOS 26 (github.com/pytorch/executorch/pull/15936). The
stored rows of the tokens are gathered, and widened by ordinary arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 - its customary name
from coremltools.converters.mil.mil import Function, Program, types
from coremltools.converters.mil.mil.block import curr_block
from coremltools.optimize._utils import pack_elements_into_bits
from numpy.typing import NDArray
from torch import Tensor

from moa_drafter.llama import DecoderLayer, RMSNorm, rotary_angles
from moa_drafter.model import MoADrafter
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Recipe, Weights

#: A value of a MIL function under construction.
Var = Any
#: Multiplies float16 ``[T, in]`` by a stored matrix ``[out, in]``: float16 ``[T, out]``.
Linear = Callable[[Var], Var]
#: Takes rows of a stored table ``[vocab_size, hidden]``: int32 ``[T]`` to float16 ``[T, hidden]``.
Embedding = Callable[[Var], Var]
Float16 = NDArray[np.float16]

#: Bits of an index if 4 bits have to be a palette: one of 16 values for a whole matrix loses more than groups do.
PALETTE_BITS = 6
# The smallest normal float16: the Neural Engine takes smaller numbers for zero.
_LEAST_SCALE = np.float16(2.0**-14)
_LLOYD_ROUNDS = 100
#: Tokens of one call that predicts; of one that only appends; memory rows of one call.
STEP_SIZES, EXTEND_SIZE, ROWS_SIZE = (1, 8), 32, 32
STATELESS_SIZE = 8
#: The functions of the stateful program and what they are for.
FUNCTIONS = {
    **{f"step_{size}": f"append {size} token{'s' * (size > 1)} and predict what follows each" for size in STEP_SIZES},
    f"extend_{EXTEND_SIZE}": f"append {EXTEND_SIZE} tokens without predicting",
    f"remember_{ROWS_SIZE}": f"store {ROWS_SIZE} memory rows",
}
#: The cache tensors.
CACHES = ("self_keys", "self_values", "memory_keys", "memory_values")
# Numbers below this one lose precision when squared in float16, so no norm divides by less.
_LEAST_PEAK = np.float16(1e-4)


def stored_linear(name: str, weight: Tensor, spec: Weights, opset: ct.target) -> Linear:
    """Round ``weight [out, in]`` to the form in which an operator set stores it.

    Args:
        name: unique in the program.
    """
    if not spec.is_integer:
        halves = half(weight)
        return lambda x: mb.linear(x=x, weight=shared_constant(name, halves))
    if opset < ct.target.iOS18 and spec.bits == 4:
        return _palette_linear(name, weight)
    # iOS 17 has no groups.
    codes, scales = round_symmetric(weight, spec.bits, spec.group_size if opset >= ct.target.iOS18 else 0)
    # coremltools tells 4-bit integers from int8 by a mark on numpy's dtype.
    integers = codes.numpy().astype(types.nptype_from_builtin(types.int4) if spec.bits == 4 else np.int8)

    def multiply(x: Var) -> Var:
        data = shared_constant(f"{name}_codes", integers)
        if opset >= ct.target.iOS18:
            scale = shared_constant(f"{name}_scales", scales.numpy())
            return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=scale))
        scale = shared_constant(f"{name}_scales", scales[:, 0].numpy())
        widened = mb.constexpr_affine_dequantize(quantized_data=data, zero_point=np.int8(0), scale=scale, axis=0)
        return mb.linear(x=x, weight=widened)

    return multiply


def _palette_linear(name: str, weight: Tensor) -> Linear:
    indices, palette, scales = fit_palette(_numpy(weight), 2**PALETTE_BITS)
    packed = pack_elements_into_bits(indices, PALETTE_BITS)

    def multiply(x: Var) -> Var:
        widened = mb.constexpr_lut_to_dense(
            indices=shared_constant(f"{name}_indices", packed),
            lut=shared_constant(f"{name}_palette", palette),
            shape=np.array(weight.shape, np.uint32),
        )
        return mb.mul(x=mb.linear(x=x, weight=widened), y=shared_constant(f"{name}_scales", scales[:, 0]))

    return multiply


def stored_embedding(name: str, table: Tensor, spec: Weights) -> Embedding:
    """Round ``table [vocab_size, hidden]`` to its stored form, the same for every operator set."""
    if not spec.is_integer:
        halves = half(table)
        return lambda tokens: take_rows(shared_constant(name, halves), tokens)
    quantised = QuantisedEmbedding(table, spec)

    def take(tokens: Var) -> Var:
        """Widen rows as :class:`~moa_export.quantize.QuantisedEmbedding` does."""
        rows = take_rows(shared_constant(f"{name}_rows", quantised.rows.numpy()), tokens)
        scales = take_rows(shared_constant(f"{name}_scales", quantised.scales.numpy()), tokens)
        codes = mb.cast(x=rows, dtype="fp16")
        if quantised.bits == 4:
            # All of these numbers are whole and below 256: exact in float16.
            high = mb.floor(x=mb.mul(x=codes, y=np.float16(1 / 16)))
            low = mb.sub(x=codes, y=mb.mul(x=high, y=np.float16(16)))
            codes = mb.sub(x=mb.concat(values=[low, high], axis=1), y=np.float16(8))
        count, width = codes.shape
        blocks = mb.reshape(x=codes, shape=[count, width // quantised.group, quantised.group])
        return mb.reshape(x=mb.mul(x=blocks, y=mb.expand_dims(x=scales, axes=[2])), shape=[count, width])

    return take


def stored_form(spec: Weights, opset: ct.target) -> str:
    """Describe the form in which a matrix is stored."""
    if not spec.is_integer:
        return "float16"
    if opset < ct.target.iOS18:
        return "int8, one scale a row" if spec.bits == 8 else f"{2**PALETTE_BITS} values, one scale a row"
    return f"int{spec.bits}, " + (f"one scale for {spec.group_size} inputs" if spec.group_size else "one scale a row")


def shared_constant(name: str, value: NDArray[Any]) -> Var:
    """Return a constant that a function holds once; all functions of a program share its bytes under ``name``."""
    for operation in curr_block().operations:
        if operation.name == name:
            return operation.outputs[0]
    constant = mb.const(val=value, name=name)
    constant.op.weight_id = name
    return constant


def fit_palette(weight: NDArray[np.float32], size: int) -> tuple[NDArray[np.uint8], Float16, Float16]:
    """Choose one palette of ``size`` values for a matrix whose rows are first scaled alike.

    Lloyd's algorithm on a histogram of the scaled weights.

    Args:
        weight: ``[out, in]``.

    Returns:
        uint8 indices ``[out, in]`` into the palette, the float16 palette ``[size]``, ascending, and the float16
        scale of each row ``[out, 1]``, its root mean square.
    """
    scales = np.maximum(np.sqrt(np.square(weight).mean(axis=1, keepdims=True)), _LEAST_SCALE).astype(np.float16)
    scaled = weight / scales.astype(np.float32)
    counts, edges = np.histogram(scaled, bins=4096)
    centres = (edges[:-1] + edges[1:]) / 2
    shares = np.cumsum(counts) / counts.sum()
    palette = np.interp((np.arange(size) + 0.5) / size, shares, centres)
    for _ in range(_LLOYD_ROUNDS):
        nearest = np.searchsorted((palette[1:] + palette[:-1]) / 2, centres)
        members = np.bincount(nearest, counts, size)
        sums = np.bincount(nearest, counts * centres, size)
        palette = np.sort(np.where(members > 0, sums / np.maximum(members, 1), palette))
    stored = palette.astype(np.float16)
    limits = (stored[1:].astype(np.float32) + stored[:-1]) / 2
    return np.searchsorted(limits, scaled).astype(np.uint8), stored, scales


def take_rows(table: Var, indices: Var, **name: str) -> Var:
    """Take rows of ``table [n, ...]`` by position, int32 ``[...]``."""
    return mb.gather(x=table, indices=indices, axis=0, batch_dims=0, validate_indices=False, **name)


def half(weight: Tensor) -> Float16:
    return _numpy(weight).astype(np.float16)


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    return weight.detach().float().numpy()


def stateful_program(drafter: MoADrafter, recipe: Recipe, capacity: int) -> Program:
    """Functions that share weights and keep their caches in states, for iOS 18 and macOS 15.

    Those of :data:`FUNCTIONS`. All declare the same states, so that a state made by one serves the others.
    """
    network = _Network(drafter, recipe, capacity, ct.target.iOS18)
    functions = [
        *(network.stateful_step(size) for size in STEP_SIZES),
        network.extend(EXTEND_SIZE),
        network.remember(ROWS_SIZE),
    ]
    program = Program()
    for name, function in zip(FUNCTIONS, functions, strict=True):
        program.add_function(name, function)
    program.default_function_name = next(iter(FUNCTIONS))
    program.export_as_multifunction = True
    return program


def stateless_program(drafter: MoADrafter, recipe: Recipe, capacity: int) -> Program:
    """One function whose caches are inputs, for iOS 17 and macOS 14, which know neither states nor functions."""
    network = _Network(drafter, recipe, capacity, ct.target.iOS17)
    program = Program()
    program.add_function("main", network.stateless_step(STATELESS_SIZE))
    return program


class _Network:
    """The device half's weights, and the functions that use them.

    Args:
        capacity: ``C``.
        opset: the oldest system that the program is for.
    """

    def __init__(self, drafter: MoADrafter, recipe: Recipe, capacity: int, opset: ct.target) -> None:
        config = drafter.config
        head_dim = config.decoder.head_dim
        self._opset = opset
        self._top_k = min(recipe.top_k, config.draft_vocab_size)
        self._capacity = capacity
        self._kv_heads, self._head_dim = config.decoder.num_kv_heads, head_dim
        self._embed = stored_embedding("embedding", drafter.embedding, recipe.embedding)
        self._self_attention = SelfAttentionLayer("self_attention", drafter.self_attention, recipe.linear, opset)
        self._cross_attention = Layer("cross_attention", drafter.cross_attention, recipe.linear, opset)
        self._norm = Norm.of("norm", drafter.norm) if isinstance(drafter.norm, RMSNorm) else None
        self._head = stored_linear("head", drafter.head, recipe.head, opset)
        self._draft_to_target = drafter.draft_to_target.numpy().astype(np.int32)
        # A table, because float16 cannot tell positions apart from 2048 on. Both halves of a head turn alike.
        angles = rotary_angles(torch.arange(capacity), head_dim, config.rope_theta)
        self._cosines, self._sines = (half(table[:, :, : head_dim // 2]) for table in angles)

    def stateful_step(self, size: int) -> Function:
        """Append ``size`` tokens at a slot of the cache and predict what follows each."""

        def body(inputs: dict[str, Var]) -> Sequence[Var]:
            x, angles, new = self._fresh(inputs)
            self_kv = _store(inputs, "self", new)
            memory = tuple(mb.read_state(input=inputs[name]) for name in ("memory_keys", "memory_values"))
            return self._predict(x, angles, self_kv, memory, inputs)

        masks = {"self_mask": _halves(size, self._capacity), "memory_mask": _halves(1, self._capacity)}
        return self._function({**_tokens(size), "slot": _integers(1), **masks, **self._states()}, body)

    def extend(self, size: int) -> Function:
        """Append ``size`` tokens at a slot of the cache; nothing but their keys and values is computed."""

        def body(inputs: dict[str, Var]) -> Sequence[Var]:
            _store(inputs, "self", self._fresh(inputs)[2])
            return [_slot_after(inputs["slot"], size)]

        return self._function({**_tokens(size), "slot": _integers(1), **self._states()}, body)

    def remember(self, size: int) -> Function:
        """Write ``size`` memory rows at a slot."""

        def body(inputs: dict[str, Var]) -> Sequence[Var]:
            _store(inputs, "memory", (inputs["new_keys"], inputs["new_values"]))
            return [_slot_after(inputs["slot"], size)]

        rows = {name: _halves(1, self._kv_heads, size, self._head_dim) for name in ("new_keys", "new_values")}
        return self._function({**rows, "slot": _integers(1), **self._states()}, body)

    def stateless_step(self, size: int) -> Function:
        """Predict what follows each of ``size`` tokens; the caches are inputs and stay as they are."""

        def body(inputs: dict[str, Var]) -> Sequence[Var]:
            x, angles, new = self._fresh(inputs)
            keys = mb.concat(values=[inputs["self_keys"], new[0]], axis=2)
            values = mb.concat(values=[inputs["self_values"], new[1]], axis=2)
            memory = inputs["memory_keys"], inputs["memory_values"]
            return *self._predict(x, angles, (keys, values), memory, inputs), *new

        masks = {"self_mask": _halves(size, self._capacity + size), "memory_mask": _halves(1, self._capacity)}
        caches = {name: _halves(1, self._kv_heads, self._capacity, self._head_dim) for name in CACHES}
        return self._function({**_tokens(size), **masks, **caches}, body)

    def _states(self) -> dict[str, Any]:
        shape = (1, self._kv_heads, self._capacity, self._head_dim)
        return {name: mb.state_tensor_placeholder(shape, types.fp16) for name in CACHES}

    def _function(self, inputs: dict[str, Any], body: Callable[[dict[str, Var]], Sequence[Var]]) -> Function:
        # coremltools counts the operators of the whole process; names must not depend on earlier programs.
        mb.name_count.clear()
        with Function(inputs, opset_version=self._opset) as function:
            function.set_outputs(list(body(function.inputs)))
        return function

    def _fresh(self, inputs: dict[str, Var]) -> tuple[Var, tuple[Var, Var], tuple[Var, Var]]:
        """Return what the first layer knows of new tokens: embeddings ``[T, hidden]``, cosines and sines of their
        positions ``[T, 1, D/2]``, and cache entries ``[1, KV, T, D]``."""
        x = self._embed(inputs["tokens"])
        angles = (
            take_rows(shared_constant("cosines", self._cosines), inputs["positions"]),
            take_rows(shared_constant("sines", self._sines), inputs["positions"]),
        )
        return x, angles, self._self_attention.keys_values(x, angles)

    def _predict(
        self,
        x: Var,
        angles: tuple[Var, Var],
        self_kv: tuple[Var, Var],
        memory: tuple[Var, Var],
        masks: dict[str, Var],
    ) -> tuple[Var, Var]:
        """Return int32 tokens and float32 log-probabilities of the best continuations, ``[T, K]`` each."""
        hidden = self._self_attention(x, angles, *self_kv, masks["self_mask"])
        hidden = self._cross_attention(hidden, angles, *memory, masks["memory_mask"])
        logits = self._head(self._norm(hidden) if self._norm else hidden)
        top, indices = mb.topk(x=logits, k=self._top_k, axis=-1, ascending=False)
        tokens = take_rows(shared_constant("draft_to_target", self._draft_to_target), indices, name="top_tokens")
        # The sum over the whole draft vocabulary has too many small terms for float16.
        total = mb.reduce_log_sum_exp(x=mb.cast(x=logits, dtype="fp32"), axes=[-1], keep_dims=True)
        return tokens, mb.sub(x=mb.cast(x=top, dtype="fp32"), y=total, name="top_logprobs")


def _slot_after(slot: Var, size: int) -> Var:
    """The output of functions that have none of their own: Core ML wants one, but not what is written to a state
    (loading crashes: github.com/apple/coremltools/pull/2713)."""
    return mb.add(x=slot, y=np.int32(size), name="next_slot")


def _store(inputs: dict[str, Var], cache: str, new: tuple[Var, Var]) -> tuple[Var, Var]:
    """Write new keys and values ``[1, KV, T, D]`` at ``slot`` of the states of ``cache``; the whole caches as
    they are then."""
    whole_axis = [True, True, False, True]
    begin = mb.concat(values=[np.zeros(2, np.int32), inputs["slot"], np.zeros(1, np.int32)], axis=0)
    end = mb.add(x=begin, y=np.array([0, 0, new[0].shape[2], 0], np.int32))
    states = inputs[f"{cache}_keys"], inputs[f"{cache}_values"]
    keys, values = (
        mb.coreml_update_state(
            state=state,
            value=mb.slice_update(
                x=mb.read_state(input=state),
                update=update,
                begin=begin,
                end=end,
                begin_mask=whole_axis,
                end_mask=whole_axis,
            ),
        )
        for state, update in zip(states, new, strict=True)
    )
    return keys, values


def _tokens(size: int) -> dict[str, Any]:
    return {"tokens": _integers(size), "positions": _integers(size)}


def _integers(*shape: int) -> Any:
    return mb.TensorSpec(shape, types.int32)


def _halves(*shape: int) -> Any:
    return mb.TensorSpec(shape, types.fp16)


class Norm:
    """Root-mean-square norm over the last axis.

    Values are first divided by the largest of them: their squares would overflow float16 from 256 on, and
    vanish below 0.0002.
    """

    def __init__(self, name: str, weight: Float16, epsilon: float) -> None:
        self._name, self._weight = name, weight
        self._root_eps = np.float16(math.sqrt(epsilon))

    @classmethod
    def of(cls, name: str, norm: RMSNorm) -> Norm:
        """Make that of a module of PyTorch."""
        return cls(name, half(norm.weight), norm.eps)

    def __call__(self, x: Var) -> Var:
        """``[T, hidden]`` -> ``[T, hidden]``."""
        peak = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True), y=_LEAST_PEAK)
        scaled = mb.real_div(x=x, y=peak)
        mean = mb.reduce_mean(x=mb.square(x=scaled), axes=[-1], keep_dims=True)
        eps = mb.square(x=mb.real_div(x=self._root_eps, y=peak))
        normed = mb.real_div(x=scaled, y=mb.sqrt(x=mb.add(x=mean, y=eps)))
        return mb.mul(x=normed, y=shared_constant(self._name, self._weight))


class Layer:
    """A decoder layer whose keys and values come from outside."""

    def __init__(self, name: str, layer: DecoderLayer, spec: Weights, opset: ct.target) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._dims = attention.dims
        self._input_norm = Norm.of(f"{name}_input_norm", layer.input_layernorm)
        self._query = stored_linear(f"{name}_query", attention.q_proj.weight, spec, opset)
        self._output = stored_linear(f"{name}_output", attention.o_proj.weight, spec, opset)
        self._mlp_norm = Norm.of(f"{name}_mlp_norm", layer.post_attention_layernorm)
        self._gate = stored_linear(f"{name}_gate", mlp.gate_proj.weight, spec, opset)
        self._up = stored_linear(f"{name}_up", mlp.up_proj.weight, spec, opset)
        self._down = stored_linear(f"{name}_down", mlp.down_proj.weight, spec, opset)

    def __call__(self, x: Var, angles: tuple[Var, Var], keys: Var, values: Var, mask: Var) -> Var:
        """Attention and feed-forward network.

        Args:
            x: ``[T, hidden]``.
            angles: of the tokens' positions, see :func:`rotate`.
            keys, values: ``[1, KV, S, D]``.
            mask: ``[T, S]`` or ``[1, S]``, 0 where a query may look and very negative elsewhere.

        Returns:
            ``[T, hidden]``.
        """
        x = mb.add(x=x, y=self._attend(self._input_norm(x), angles, keys, values, mask))
        normed = self._mlp_norm(x)
        return mb.add(x=x, y=self._down(mb.mul(x=mb.silu(x=self._gate(normed)), y=self._up(normed))))

    def _attend(self, normed: Var, angles: tuple[Var, Var], keys: Var, values: Var, mask: Var) -> Var:
        dims, tokens = self._dims, normed.shape[0]
        groups = dims.num_heads // dims.num_kv_heads
        q = rotate(mb.reshape(x=self._query(normed), shape=[tokens, dims.num_heads, dims.head_dim]), *angles)
        q = mb.mul(x=q, y=np.float16(1 / math.sqrt(dims.head_dim)))
        q = mb.reshape(x=q, shape=[tokens, dims.num_kv_heads, groups, dims.head_dim])
        rows = [1, dims.num_kv_heads, groups * tokens, dims.head_dim]
        q = mb.reshape(x=mb.transpose(x=q, perm=[1, 2, 0, 3]), shape=rows)
        if mask.shape[0] > 1:
            mask = mb.tile(x=mask, reps=[groups, 1])
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=keys, transpose_y=True), y=mask), axis=-1)
        mixed = mb.reshape(x=mb.matmul(x=shares, y=values), shape=[dims.num_kv_heads, groups, tokens, dims.head_dim])
        flat = [tokens, dims.num_heads * dims.head_dim]
        return self._output(mb.reshape(x=mb.transpose(x=mixed, perm=[2, 0, 1, 3]), shape=flat))


class SelfAttentionLayer(Layer):
    """The layer whose keys and values come from the tokens themselves."""

    def __init__(self, name: str, layer: DecoderLayer, spec: Weights, opset: ct.target) -> None:
        super().__init__(name, layer, spec, opset)
        self._key = stored_linear(f"{name}_key", layer.self_attn.k_proj.weight, spec, opset)
        self._value = stored_linear(f"{name}_value", layer.self_attn.v_proj.weight, spec, opset)

    def keys_values(self, x: Var, angles: tuple[Var, Var]) -> tuple[Var, Var]:
        """``[T, hidden]`` -> the cache entries ``keys`` and ``values``, ``[1, KV, T, D]`` each."""
        shape = [x.shape[0], self._dims.num_kv_heads, self._dims.head_dim]
        normed = self._input_norm(x)
        keys = rotate(mb.reshape(x=self._key(normed), shape=shape), *angles)
        values = mb.reshape(x=self._value(normed), shape=shape)
        return _heads_first(keys, "keys"), _heads_first(values, "values")


def rotate(x: Var, cos: Var, sin: Var) -> Var:
    """Apply rotary positions to ``x [T, heads, D]``; ``cos`` and ``sin [T, 1, D/2]`` serve both halves."""
    first, second = mb.split(x=x, num_splits=2, axis=-1)
    turned = (
        mb.sub(x=mb.mul(x=first, y=cos), y=mb.mul(x=second, y=sin)),
        mb.add(x=mb.mul(x=second, y=cos), y=mb.mul(x=first, y=sin)),
    )
    return mb.concat(values=turned, axis=-1)


def _heads_first(x: Var, name: str) -> Var:
    """``[T, KV, D]`` -> ``[1, KV, T, D]``."""
    return mb.expand_dims(x=mb.transpose(x=x, perm=[1, 0, 2]), axes=[0], name=name)
