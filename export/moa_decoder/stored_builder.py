"""Graphs that are files: their constants take few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from moa_decoder.graph_builder import GraphBuilder
from moa_decoder.matrix import ZERO, Float32, Matrix

#: Numbers from which on a constant is worth a node that widens it.
_LARGE = 1024


class StoredBuilder(GraphBuilder):
    """Builds the graph of a file. Constants take 16 bits if that loses nothing, and are widened when it is loaded."""

    def __init__(self, epsilon: float, *, integer_products: bool = True) -> None:
        super().__init__(epsilon, integer_products=integer_products)
        #: Values of large constants by place, shape and strides, and the constants, which keep their places.
        self._wide: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[str, NDArray[Any]]] = {}

    def constant(self, array: NDArray[Any] | np.generic, name: str | None = None) -> str:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.constant`."""
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.size < _LARGE:
            return super().constant(array, name)
        key = array.ctypes.data, array.shape, array.strides
        if key not in self._wide:
            half = _halved(array)
            value = super().constant(array, name) if half is None else self._widened(half)
            self._wide[key] = value, array
        return self._wide[key][0]

    def offsets(self, matrix: Matrix) -> str:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.offsets`. Stored are what the code 0 stands for, 16 bits in
        GGUF's Q4_1."""
        assert matrix.scales is not None and matrix.offsets is not None
        zero = np.float32(ZERO[matrix.bits])
        with np.errstate(over="ignore"):
            least = (matrix.offsets - zero * matrix.scales).astype(np.float16)
        if not np.array_equal(least.astype(np.float32) + zero * matrix.scales, matrix.offsets):
            return super().offsets(matrix)
        middle = self.op("Mul", self.constant(matrix.scales), self.constant(zero))
        return self.op("Transpose", self.op("Add", self._widened(least), middle), perm=[1, 0])

    def _widened(self, half: NDArray[np.float16]) -> str:
        return self.op("Cast", super().constant(half), to=TensorProto.FLOAT)


def _halved(array: Float32) -> NDArray[np.float16] | None:
    """Return the numbers in 16 bits, or None if that changes one."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else None
