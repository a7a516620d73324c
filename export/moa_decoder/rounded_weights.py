"""Weights whose matrices are rounded to 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moa_decoder.matrix import GROUP, ZERO, Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.spec import DecoderSpec
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector


@dataclass(frozen=True)
class RoundedWeights:
    """Round the matrices of other weights that have more bits; the others stay as they are.

    Attributes:
        bits: of the layers' matrices, 4 or 8. 4 are on the grid of GGUF's Q4_1, see :func:`rounded_between`.
        table_bits: of embedding and head.
    """

    weights: DecoderWeights
    bits: int
    table_bits: int = 8

    @property
    def spec(self) -> DecoderSpec:
        return self.weights.spec

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        return _at_most(self.weights.matrix(layer, name), self.bits)

    def vector(self, layer: int, name: LayerVector) -> Float32:
        return self.weights.vector(layer, name)

    def head(self) -> Matrix:
        return _at_most(self.weights.head(), self.table_bits)

    def head_bias(self) -> Float32:
        return self.weights.head_bias()

    def last_norm(self) -> Float32:
        return self.weights.last_norm()

    def embedding(self) -> Matrix:
        return _at_most(self.weights.embedding(), self.table_bits)

    def embed(self, tokens: Sequence[int]) -> Float32:
        return self.weights.embed(tokens)


def rounded_between(dense: Float32, bits: int = 4, group: int = GROUP) -> Matrix:
    """Round ``[out, in]`` to 4 or 8 bits, each group between its least and its largest number.

    What lies on such a grid already, as Q4_1 of GGUF does, is represented exactly: its extremes are in use. Scales and
    least numbers fit into float16.
    """
    most = 2**bits - 1
    groups = dense.reshape(len(dense), -1, group)
    least = groups.min(-1).astype(np.float16).astype(np.float32)
    scales = ((groups.max(-1) - least) / most).astype(np.float16).astype(np.float32)
    steps = np.where(scales == 0, np.float32(1), scales)
    codes = np.rint((groups - least[..., None]) / steps[..., None]).clip(0, most).astype(np.uint8)
    stored = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return Matrix(bits, stored, scales, least + np.float32(ZERO[bits]) * scales)


def _at_most(matrix: Matrix, bits: int) -> Matrix:
    if matrix.bits <= bits:
        return matrix
    return rounded_between(matrix.dense()) if bits == 4 else rounded(matrix.dense(), bits)
