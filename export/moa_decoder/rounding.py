"""Rounding matrices to nearest in groups, as exports do."""

from __future__ import annotations

import numpy as np

from moa_decoder.errors import TargetError
from moa_decoder.matrix import GROUP, Float32, Matrix

#: The smallest normal float16, as which scales are kept.
_LEAST_SCALE = np.float32(2.0**-14)
#: With few codes it pays to clip the largest number of a group: its error against that of all others.
_SHARES = {4: (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75), 8: (1.0,)}
_ROWS_AT_ONCE = 128


def rounded(dense: Float32, bits: int, group: int = GROUP) -> Matrix:
    """Round a matrix, float32 ``[out, in]``, to 4 or 8 bits with one scale a group of inputs, those with the least
    squared error; 32 leaves it. The arithmetic is that of ``moa_export.quantize``.

    Raises:
        TargetError: ``unsupported_group`` if groups do not divide its inputs.
    """
    if bits == 32:
        return Matrix(32, dense)
    if dense.shape[1] % group:
        raise TargetError(
            f"a matrix with {dense.shape[1]} inputs cannot be rounded in groups of {group}: choose --dtype float32",
            code="unsupported_group",
        )
    most = 2 ** (bits - 1) - 1
    stored = np.empty((len(dense), dense.shape[1] // group, group * bits // 8), np.uint8)
    scales = np.empty(stored.shape[:2], np.float32)
    for start in range(0, len(dense), _ROWS_AT_ONCE):  # the temporaries stay small
        rows = slice(start, start + _ROWS_AT_ONCE)
        codes, scales[rows] = _round(dense[rows].reshape(-1, stored.shape[1], group), most, _SHARES[bits])
        above = (codes + (most + 1)).astype(np.uint8)
        stored[rows] = above if bits == 8 else above[..., ::2] | above[..., 1::2] << 4
    return Matrix(bits, stored, scales)


def _round(groups: Float32, most: int, shares: tuple[float, ...]) -> tuple[Float32, Float32]:
    """Return codes ``[rows, groups, group]`` and scales ``[rows, groups]``."""
    largest = np.abs(groups).max(-1, keepdims=True)
    codes, scales = _codes(groups, largest, most)
    if len(shares) == 1:
        return codes, scales[..., 0]
    least = _error(groups, codes, scales)
    for share in shares[1:]:
        others, narrower = _codes(groups, largest * np.float32(share), most)
        error = _error(groups, others, narrower)
        better = error < least
        least = np.minimum(error, least)
        np.copyto(codes, others, where=better)
        np.copyto(scales, narrower, where=better)
    return codes, scales[..., 0]


def _codes(groups: Float32, largest: Float32, most: int) -> tuple[Float32, Float32]:
    """Codes in steps of the scale as it is kept, not of the exact one."""
    scales = np.maximum(largest / np.float32(most), _LEAST_SCALE).astype(np.float16).astype(np.float32)
    codes = groups / scales
    np.rint(codes, out=codes)
    return np.clip(codes, -most - 1, most, out=codes), scales


def _error(groups: Float32, codes: Float32, scales: Float32) -> Float32:
    missed = codes * scales
    missed -= groups
    error: Float32 = np.einsum("rgi,rgi->rg", missed, missed)[..., None]
    return error
