"""The drafter's layers as MIL operators, in float16.

Attention is two products and a softmax. The fused operator of iOS 18 gives wrong numbers in quantised models
on iOS 26 (github.com/pytorch/executorch/pull/16144) and crashes on some processors with more than one query
(github.com/kasper0406/stablehlo-coreml/pull/89). The query heads that share a key are stacked as rows, so that
keys are never repeated and no leading axis comes near 10: where a GPU fuses the pattern again, it computes
larger batches wrongly (github.com/apple/coremltools/issues/2650).
"""

from __future__ import annotations

import math

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 - its customary name

from moa_drafter.llama import DecoderLayer, RMSNorm
from moa_export.recipe import Weights
from moa_export.targets.coreml_weights import Var, half, shared_constant, stored_linear

# Numbers below this one lose precision when squared in float16, so no norm divides by less.
_LEAST_PEAK = np.float16(1e-4)


class Norm:
    """Root-mean-square norm over the last axis.

    Values are first divided by the largest of them: their squares would overflow float16 from 256 on, and
    vanish below 0.0002.
    """

    def __init__(self, name: str, norm: RMSNorm) -> None:
        self._name, self._weight = name, half(norm.weight)
        self._root_eps = np.float16(math.sqrt(norm.eps))

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
        self._input_norm = Norm(f"{name}_input_norm", layer.input_layernorm)
        self._query = stored_linear(f"{name}_query", attention.q_proj.weight, spec, opset)
        self._output = stored_linear(f"{name}_output", attention.o_proj.weight, spec, opset)
        self._mlp_norm = Norm(f"{name}_mlp_norm", layer.post_attention_layernorm)
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
