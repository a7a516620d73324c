"""The blocks of GGUF tensors as matrices in 4 or 8 bits, and as float32 (types: ggml, ggml-common.h)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import Tensor
from moa_decoder.matrix import Float32, Matrix

#: Rows of a tensor.
Rows = slice | NDArray[np.int64]
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
_LOW, _HIGH = np.uint16(0x0F), np.uint16(0xF0)


class _Groups(NamedTuple):
    """Numbers ``codes * scales + minima``, the operations of ggml.

    Attributes:
        codes: int8 ``[rows, groups, numbers of a group]``.
        scales: float32 ``[rows, groups]``.
        minima: as scales; None if all are 0.
    """

    codes: NDArray[np.int8]
    scales: Float32
    minima: Float32 | None


def dense_rows(tensor: Tensor, rows: Rows = slice(None)) -> Float32:
    """Return all or some rows of a tensor, float32 ``[n, numbers of a row]``, equal to ggml's to the bit. A vector is
    one row. Raises TargetError: ``unsupported_type``, ``damaged`` if a scale is not finite."""
    blocks, kind = tensor.blocks()[rows], tensor.type.name
    if kind == "F32":
        return blocks.view("<f4").astype(np.float32)
    if kind == "F16":
        return blocks.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    codes, scales, minima = _groups(tensor, blocks)
    dense = codes.astype(np.float32) * scales[..., None]
    if minima is not None:
        dense += minima[..., None]
    return dense.reshape(len(blocks), -1)


def bits_of(tensor: Tensor) -> int:
    """Return the bits of :func:`matrix_of` for a tensor."""
    return 32 if tensor.type.block == 1 else 4 if tensor.type.name in _FOUR_BITS else 8


def matrix_of(tensor: Tensor, rows: Rows = slice(None)) -> Matrix:
    """Return all or some rows of a tensor as a matrix. ``Matrix.dense`` gives ggml's numbers to the bit, but for
    offsets in 4 bits if they are thousands of times their scale (then to a rounding of float32). Raises TargetError:
    see :func:`dense_rows`."""
    kind, blocks = tensor.type.name, tensor.blocks()[rows]
    if bits_of(tensor) == 32:
        return Matrix(32, dense_rows(tensor, rows))
    if kind in _FOUR_BITS:
        stored, (scales, minima) = _nibbles(kind, blocks), _scales(tensor, blocks)
        return Matrix(4, stored, scales, None if minima is None else minima + 8 * scales)
    codes, scales, minima = _groups(tensor, blocks)
    return Matrix(8, codes.view(np.uint8) ^ np.uint8(128), scales, minima)


def _scales(tensor: Tensor, blocks: NDArray[np.uint8]) -> tuple[Float32, Float32 | None]:
    """Return scales and minima, float32 ``[rows, groups]``."""
    kind = tensor.type.name
    each = blocks.reshape(len(blocks), -1, tensor.type.size)
    if kind == "Q6_K":
        halves = _float16(each, 208)
        scales, minima = halves * each[..., 192:208].view(np.int8), None
    elif kind in ("Q4_K", "Q5_K"):
        low, lows, mixed = each[..., 4:8], each[..., 8:12], each[..., 12:16]
        factors = np.concatenate((low & 63, mixed & 15 | low >> 2 & 48), -1)
        offsets = np.concatenate((lows & 63, mixed >> 4 | lows >> 2 & 48), -1)
        scales, minima = _float16(each, 0) * factors, -(_float16(each, 2) * offsets)
    else:
        scales, minima = _float16(each, 0), _float16(each, 2) if kind in ("Q4_1", "Q5_1") else None
    pair = (scales.reshape(len(blocks), -1), None if minima is None else minima.reshape(len(blocks), -1))
    if not all(np.isfinite(half).all() for half in pair if half is not None):
        raise tensor.file.damaged(f"{tensor.name[:60]!r} has scales that are not finite")
    return pair


def _float16(blocks: NDArray[np.uint8], at: int) -> Float32:
    """Return the float16 at a place of each block, float32 ``[rows, blocks, 1]``."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return numbers of 4 bits in the order of :class:`moa_decoder.matrix.Matrix`, uint8 ``[rows, groups, 16]``.

    ggml has the two halves of a block of 32 (Q4_K: two groups of 32) in the low and high halves of its bytes.
    """
    if kind == "Q4_K":
        each = blocks.reshape(len(blocks), -1, 144)[..., 16:].reshape(len(blocks), -1, 32)
    else:
        size = 18 if kind == "Q4_0" else 20
        each = blocks.reshape(len(blocks), -1, size)[..., size - 16 :]
    words = np.ascontiguousarray(each).view("<u2")  # two neighbours of each half
    low, high = words & _LOW | words >> 4 & _HIGH, words >> 4 & _LOW | words >> 8 & _HIGH
    return np.concatenate((low.astype(np.uint8), high.astype(np.uint8)), -1).reshape(len(blocks), -1, 16)


def _groups(tensor: Tensor, blocks: NDArray[np.uint8]) -> _Groups:
    kind, rows = tensor.type.name, len(blocks)
    each = blocks.reshape(rows, -1, tensor.type.size)
    if kind in _FOUR_BITS:
        stored = _nibbles(kind, blocks)
        codes: NDArray[np.int8] = np.stack((stored & 15, stored >> 4), -1).view(np.int8).reshape(rows, -1, 32)
        codes = codes - np.int8(8) if kind == "Q4_0" else codes
    elif kind in ("Q5_0", "Q5_1"):
        start = 6 if kind == "Q5_0" else 8
        fifth = np.unpackbits(each[..., start - 4 : start], axis=-1, bitorder="little")
        codes = (_halves(each[..., start:]) | fifth << 4).view(np.int8)
        codes = codes - np.int8(16) if kind == "Q5_0" else codes
    elif kind == "Q8_0":
        codes = each[..., 2:].view(np.int8)
    elif kind == "Q5_K":
        bits = each[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        fours = _halves(each[..., 48:].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
        codes = (fours | bits.astype(np.uint8) << 4).view(np.int8).reshape(rows, -1, 32)
    elif kind == "Q6_K":
        fours = _halves(each[..., :128].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, 32)
        twos = each[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes = ((fours | twos << 4).view(np.int8) - np.int8(32)).reshape(rows, -1, 16)
    else:
        raise TargetError(
            f"{tensor.file.path.name} has tensors of the type {kind}, which this reader does not know: take a file in "
            "Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0 or F16",
            code="unsupported_type",
        )
    return _Groups(codes, *_scales(tensor, blocks))


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the low halves of bytes, then the high ones, along the last dimension."""
    return np.concatenate((packed & 15, packed >> 4), -1)
