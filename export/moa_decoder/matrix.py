"""A weight matrix in 4, 8 or 32 bits, as onnxruntime's products take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

#: Inputs that share a scale and an offset, unless a matrix says otherwise.
GROUP = 32
#: Stored value of zero, by bits.
ZERO = {4: 8, 8: 128}


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix ``[out, in]``; in groups of inputs it is ``scale * (stored - zero) + offset``.

    The layout is that of the operator ``MatMulNBits`` of onnxruntime.

    Attributes:
        bits: 4 or 8; 32 for plain numbers.
        stored: uint8 ``[out, in / group, group * bits / 8]``, of two 4-bit numbers the first in the low half; ``zero``
            is 8 or 128. float32 ``[out, in]`` for 32 bits.
        scales: float32 ``[out, in / group]``; None for 32 bits.
        offsets: float32 ``[out, in / group]``; None if all are 0.
    """

    bits: int
    stored: NDArray[Any]
    scales: Float32 | None = None
    offsets: Float32 | None = None

    @property
    def outputs(self) -> int:
        return len(self.stored)

    @property
    def inputs(self) -> int:
        return int(self.stored.shape[1] * self.group)

    @property
    def group(self) -> int:
        """Inputs of a group: :data:`GROUP`, 16 in ggml's Q6_K; 1 for plain numbers."""
        return 1 if self.bits == 32 else int(self.stored.shape[2] * 8 // self.bits)

    def rows(self, order: NDArray[np.int64]) -> Matrix:
        """Return the matrix of some outputs, in this order."""
        halves = (None if half is None else half[order] for half in (self.scales, self.offsets))
        return Matrix(self.bits, self.stored[order], *halves)

    def codes(self) -> NDArray[np.int8]:
        """Return the numbers in 4 or 8 bits less their zero, int8 ``[out, in]``."""
        stored = self.stored
        if self.bits == 4:
            stored = np.stack((stored & np.uint8(15), stored >> np.uint8(4)), -1)
        return (stored.reshape(self.outputs, -1) - np.uint8(ZERO[self.bits])).view(np.int8)

    def dense(self) -> Float32:
        """Return the numbers that it stands for, float32 ``[out, in]``."""
        if self.scales is None:
            return self.stored
        groups = self.codes().reshape(self.outputs, -1, self.group).astype(np.float32)
        dense = groups * self.scales[..., None]
        if self.offsets is not None:
            dense += self.offsets[..., None]
        return dense.reshape(self.outputs, -1)


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Return the outputs of several matrices one after the other; all have the same bits, groups and inputs.

    Raises:
        ValueError: bits or groups differ.
    """
    if len({(matrix.bits, matrix.group) for matrix in matrices}) != 1:
        raise ValueError("matrices of different bits or groups cannot be one")
    if len(matrices) == 1:
        return matrices[0]
    stored = np.concatenate([matrix.stored for matrix in matrices])
    if matrices[0].scales is None:
        return Matrix(32, stored)
    scales = np.concatenate([matrix.scales for matrix in matrices if matrix.scales is not None])
    if all(matrix.offsets is None for matrix in matrices):
        return Matrix(matrices[0].bits, stored, scales)
    offsets = [np.zeros_like(each.scales) if each.offsets is None else each.offsets for each in matrices]
    return Matrix(matrices[0].bits, stored, scales, np.concatenate(offsets))
