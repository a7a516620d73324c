"""Graphs for onnxruntime-web, which multiplies floats many times faster than by ``MatMulNBits``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from moa_decoder.graph_builder import GraphBuilder, Port
from moa_decoder.matrix import Matrix


class WebBuilder(GraphBuilder):
    """Builds the graph of a file for browsers: codes, which ``DequantizeLinear`` widens when it is loaded."""

    def __init__(self, epsilon: float, *, integer_products: bool = True) -> None:
        super().__init__(epsilon, integer_products=integer_products)
        self._packed: list[onnx.TensorProto] = []
        #: Matrices whose rows were taken, with their codes ``[out, in]`` and scales.
        self._tables: list[tuple[Matrix, str, str]] = []

    def by_codes(self, x: str, matrix: Matrix) -> str:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.by_codes`."""
        assert matrix.scales is not None
        for table, stored, scales in self._tables:
            if table is matrix:
                return self.op("Gemm", x, self._widened(stored, scales, matrix.group, axis=1), transB=1)
        codes, name = np.ascontiguousarray(matrix.codes().T), self._new("codes")
        if matrix.bits == 8:
            self.constant(codes, name)
        else:
            packed = codes.ravel().view(np.uint8) & np.uint8(15)
            packed = packed[0::2] | packed[1::2] << np.uint8(4)
            self._packed.append(helper.make_tensor(name, TensorProto.INT4, codes.shape, packed.tobytes(), raw=True))
        return self.op("MatMul", x, self._widened(name, self.constant(matrix.scales.T), matrix.group, axis=0))

    def rows(self, matrix: Matrix, indices: str) -> str:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.rows`."""
        if matrix.bits != 8:
            return super().rows(matrix, indices)
        assert matrix.scales is not None
        table = self.constant(matrix.codes()), self.constant(matrix.scales)
        self._tables.append((matrix, *table))
        codes = self.op("Cast", self.op("Gather", table[0], indices), to=TensorProto.FLOAT)
        groups = self.op("Reshape", codes, self.integers(-1, matrix.inputs // matrix.group, matrix.group))
        return self.scaled_rows(groups, matrix, indices)

    def model(self, inputs: Mapping[str, Port], outputs: Mapping[str, Port]) -> onnx.ModelProto:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.model`."""
        model = super().model(inputs, outputs)
        model.graph.initializer.extend(self._packed)
        return model

    def heads_product(self, x: str, others: str, *, transposed: bool = False) -> str:
        """See :meth:`moa_decoder.graph_builder.GraphBuilder.heads_product`."""
        return self.op("MatMul", x, self.op("Transpose", others, perm=[1, 2, 0] if transposed else [1, 0, 2]))

    def _widened(self, codes: str, scales: str, group: int, *, axis: int) -> str:
        return self.op("DequantizeLinear", codes, scales, axis=axis, block_size=group)
