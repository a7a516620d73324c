"""The drafter's weights as Core ML stores them: rounded once, written once, widened by the device.

Each class holds one weight in its stored form and, when called while a MIL function is being built, adds the
operators that use it. All functions of a program share the stored bytes: constants with the same
``weight_id`` become one entry of ``weight.bin``.

The forms follow the operator set, which fixes the oldest system that can load a package:

========  =============================================  ==================================================
bits      iOS 18, macOS 15                               iOS 17, macOS 14
========  =============================================  ==================================================
16        float16                                        float16
8         ``constexpr_blockwise_shift_scale``            ``constexpr_affine_dequantize``, one scale a row
4         ``constexpr_blockwise_shift_scale``            ``constexpr_lut_to_dense``, 64 values a matrix, and one
                                                         scale a row, multiplied in after the product
========  =============================================  ==================================================

Embedding tables are not left to ``constexpr`` operators: those describe a whole table, which a device may
expand to float16 (57 MB for the default target), and models that gather from one gave wrong numbers on
iOS 26 (github.com/pytorch/executorch/pull/15936). Only the stored rows of the tokens asked for are gathered,
and widened by ordinary arithmetic.
"""

from __future__ import annotations

from typing import Any, Protocol

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 - its customary name
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.block import curr_block
from coremltools.optimize._utils import pack_elements_into_bits
from numpy.typing import NDArray
from torch import Tensor

from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Weights

#: A value of a MIL function under construction.
Var = Any
Float16 = NDArray[np.float16]

#: Of an index where 4 bits have to be a palette: one of 16 values for a whole matrix loses more than groups do.
PALETTE_BITS = 6
# The smallest normal float16: the Neural Engine takes smaller numbers for zero.
_LEAST_SCALE = np.float16(2.0**-14)


class Linear(Protocol):
    """A matrix ``[out, in]`` that values are multiplied with."""

    def __call__(self, x: Var) -> Var:
        """float16 ``[T, in]`` -> float16 ``[T, out]``."""


class Embedding(Protocol):
    """A table ``[vocab_size, hidden]`` that rows are taken from."""

    def __call__(self, tokens: Var) -> Var:
        """int32 ``[T]`` -> float16 ``[T, hidden]``."""


def stored_linear(name: str, weight: Tensor, spec: Weights, opset: ct.target) -> Linear:
    """The form in which ``weight [out, in]`` is stored for an operator set; ``name`` is unique in the program."""
    if not spec.is_integer:
        return _HalfLinear(name, weight)
    if opset >= ct.target.iOS18:
        return _BlockwiseLinear(name, weight, spec)
    return _ChannelLinear(name, weight) if spec.bits == 8 else _PaletteLinear(name, weight)


def stored_embedding(name: str, table: Tensor, spec: Weights) -> Embedding:
    """The form in which ``table [vocab_size, hidden]`` is stored; the same for every operator set."""
    if not spec.is_integer:
        return _HalfEmbedding(name, table)
    return _IntegerEmbedding(name, table, spec)


def stored_form(spec: Weights, opset: ct.target) -> str:
    """The form of a matrix in words."""
    if not spec.is_integer:
        return "float16"
    if opset < ct.target.iOS18:
        return "int8, one scale a row" if spec.bits == 8 else f"{2**PALETTE_BITS} values, one scale a row"
    return f"int{spec.bits}, " + (f"one scale for {spec.group_size} inputs" if spec.group_size else "one scale a row")


def shared_constant(name: str, value: NDArray[Any]) -> Var:
    """A constant that a function holds once, and whose bytes all functions of the program share under ``name``."""
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


_LLOYD_ROUNDS = 100


class _HalfLinear:
    def __init__(self, name: str, weight: Tensor) -> None:
        self._name, self._weight = name, half(weight)

    def __call__(self, x: Var) -> Var:
        return mb.linear(x=x, weight=shared_constant(self._name, self._weight))


class _BlockwiseLinear:
    def __init__(self, name: str, weight: Tensor, spec: Weights) -> None:
        self._name = name
        codes, scales = round_symmetric(weight, spec.bits, spec.group_size)
        # coremltools tells 4-bit integers from int8 by a mark on numpy's dtype.
        dtype = types.nptype_from_builtin(types.int4) if spec.bits == 4 else np.int8
        self._codes, self._scales = codes.numpy().astype(dtype), scales.numpy()

    def __call__(self, x: Var) -> Var:
        weight = mb.constexpr_blockwise_shift_scale(
            data=shared_constant(f"{self._name}_codes", self._codes),
            scale=shared_constant(f"{self._name}_scales", self._scales),
        )
        return mb.linear(x=x, weight=weight)


class _ChannelLinear:
    def __init__(self, name: str, weight: Tensor) -> None:
        self._name = name
        codes, scales = round_symmetric(weight, 8, 0)
        self._codes, self._scales = codes.numpy(), scales[:, 0].numpy()

    def __call__(self, x: Var) -> Var:
        weight = mb.constexpr_affine_dequantize(
            quantized_data=shared_constant(f"{self._name}_codes", self._codes),
            zero_point=np.int8(0),
            scale=shared_constant(f"{self._name}_scales", self._scales),
            axis=0,
        )
        return mb.linear(x=x, weight=weight)


class _PaletteLinear:
    def __init__(self, name: str, weight: Tensor) -> None:
        self._name, self._shape = name, tuple(weight.shape)
        indices, self._palette, scales = fit_palette(_numpy(weight), 2**PALETTE_BITS)
        self._indices = pack_elements_into_bits(indices, PALETTE_BITS)
        self._scales = scales[:, 0]

    def __call__(self, x: Var) -> Var:
        weight = mb.constexpr_lut_to_dense(
            indices=shared_constant(f"{self._name}_indices", self._indices),
            lut=shared_constant(f"{self._name}_palette", self._palette),
            shape=np.array(self._shape, np.uint32),
        )
        return mb.mul(x=mb.linear(x=x, weight=weight), y=shared_constant(f"{self._name}_scales", self._scales))


class _HalfEmbedding:
    def __init__(self, name: str, table: Tensor) -> None:
        self._name, self._table = name, half(table)

    def __call__(self, tokens: Var) -> Var:
        return take_rows(shared_constant(self._name, self._table), tokens)


class _IntegerEmbedding:
    """The table of a :class:`~moa_export.quantize.QuantisedEmbedding`, widened as that does it."""

    def __init__(self, name: str, table: Tensor, spec: Weights) -> None:
        self._name = name
        quantised = QuantisedEmbedding(table, spec)
        self._bits, self._group = quantised.bits, quantised.group
        self._rows, self._scales = quantised.rows.numpy(), quantised.scales.numpy()

    def __call__(self, tokens: Var) -> Var:
        rows = take_rows(shared_constant(f"{self._name}_rows", self._rows), tokens)
        scales = take_rows(shared_constant(f"{self._name}_scales", self._scales), tokens)
        codes = mb.cast(x=rows, dtype="fp16")
        if self._bits == 4:
            # All of these numbers are whole and below 256: exact in float16.
            high = mb.floor(x=mb.mul(x=codes, y=np.float16(1 / 16)))
            low = mb.sub(x=codes, y=mb.mul(x=high, y=np.float16(16)))
            codes = mb.sub(x=mb.concat(values=[low, high], axis=1), y=np.float16(8))
        count, width = codes.shape
        blocks = mb.reshape(x=codes, shape=[count, width // self._group, self._group])
        return mb.reshape(x=mb.mul(x=blocks, y=mb.expand_dims(x=scales, axes=[2])), shape=[count, width])


def take_rows(table: Var, indices: Var, **name: str) -> Var:
    """Rows of ``table [n, ...]`` by position, int32 ``[...]``."""
    return mb.gather(x=table, indices=indices, axis=0, batch_dims=0, validate_indices=False, **name)


def half(weight: Tensor) -> Float16:
    return _numpy(weight).astype(np.float16)


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    return weight.detach().float().numpy()
