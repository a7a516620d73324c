"""Matrices in few bits that become float32 when onnxruntime loads the graph.

A browser's build of onnxruntime multiplies floats many times faster than it multiplies by ``MatMulNBits``. So the file
holds codes and scales and a ``DequantizeLinear`` in front of a plain product, which a session that was set up with
:data:`SESSION` computes once. Other chains of nodes (``Cast``, ``Mul``, ``Reshape``) are folded without a setting, but
each of their results stays in memory until all matrices are done: 3.3 GB for the built-in writer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from moa_export.quantize import round_symmetric
from moa_export.recipe import Weights
from moa_export.targets.onnx_offsets import GROUP, product_with_offsets, round_with_offsets
from moa_runtime.drafters.base import Float32


def _session(**more: str) -> dict[str, Any]:
    return {"graphOptimizationLevel": "all", "extra": {"session": {"disable_quant_qdq": "1", **more}}}


#: How onnxruntime-web has to make a session of such a graph. Without it the graph computes the same, slowly.
SESSION = _session()
#: The same for a writer, whose floats are not laid out for products once more: less memory, steps twice as long.
WRITER_SESSION = _session(disable_prepacking="1")
_OPSET, _IR_VERSION = 21, 10  # the first with groups in DequantizeLinear, and with tensors of 4 bits
_MIDDLE = 8  # of 4-bit codes without a sign


def put_rounded(model: onnx.ModelProto, name: str, matrix: Float32, weights: Weights) -> None:
    """Put a matrix, rounded without an offset, in place of the initializer ``name``.

    Args:
        matrix: ``[inputs, outputs]``; all products by it go on as they are.
        weights: 4 or 8 bits; a group of 0 is all inputs.
    """
    codes, scales = round_symmetric(torch.from_numpy(np.ascontiguousarray(matrix.T)), weights.bits, weights.group_size)
    _put(model, name, codes.numpy().T, scales.float().numpy().T, weights.bits)


def put_rounded_with_offsets(model: onnx.ModelProto, name: str, matrix: Float32) -> None:
    """The same with 4 bits and a least value for each group of 32, as :func:`round_with_offsets` finds them."""
    codes, scales, least = round_with_offsets(matrix)
    signed = codes.reshape(len(codes), -1).astype(np.int8) - np.int8(_MIDDLE)
    _put(model, name, signed.T, scales.T, 4)
    offsets = np.ascontiguousarray((_MIDDLE * scales + least).T)
    model.graph.initializer.append(numpy_helper.from_array(offsets, f"{name}_offsets"))
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "MatMul" or node.input[1] != name:
            nodes.append(node)
            continue
        x, codes_product = node.input[0], f"{node.name}.codes"
        nodes.append(helper.make_node("MatMul", [x, name], [codes_product], name=f"{node.name}.product"))
        nodes += product_with_offsets(node, codes_product, f"{name}_offsets", len(matrix))
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def share_table(model: onnx.ModelProto, head: str, shape: tuple[int, ...]) -> None:
    """Multiply by the embedding's own codes, int8 ``[outputs, inputs]``, in place of the head of this shape."""
    graph = model.graph
    (node,) = (node for node in graph.node if node.op_type == "MatMul" and node.input[1] == head)
    inputs, outputs = shape
    codes, scales = (
        next(tensor.name for tensor in graph.initializer if tuple(tensor.dims) == dims)
        for dims in ((outputs, inputs), (outputs, inputs // GROUP))
    )
    node.CopyFrom(helper.make_node("Gemm", [node.input[0], head], list(node.output), name=node.name, transB=1))
    _widen(model, head, codes, scales, axis=1, group=GROUP)


def widen_halves(model: onnx.ModelProto) -> None:
    """Store float16 tensors as float32: a GPU in a browser may know no float16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _put(model: onnx.ModelProto, name: str, codes: NDArray[np.int8], scales: Float32, bits: int) -> None:
    """Codes ``[inputs, outputs]``, scales ``[groups, outputs]``."""
    label = f"{name}_Q{bits}"
    stored = numpy_helper.from_array(np.ascontiguousarray(codes), label) if bits == 8 else _int4(codes, label)
    model.graph.initializer.extend([stored, numpy_helper.from_array(np.ascontiguousarray(scales), f"{name}_scales")])
    _widen(model, name, label, f"{name}_scales", axis=0, group=len(codes) // len(scales))


def _widen(model: onnx.ModelProto, name: str, codes: str, scales: str, *, axis: int, group: int) -> None:
    """Make the initializer ``name`` of codes and scales when the graph is loaded."""
    graph = model.graph
    (place,) = (tensor for tensor in graph.initializer if tensor.name == name)
    graph.initializer.remove(place)
    made = helper.make_node(
        "DequantizeLinear", [codes, scales], [name], name=f"{name}.widen", axis=axis, block_size=group
    )
    nodes = [made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for opset in model.opset_import:
        if opset.domain == "":
            opset.version = max(opset.version, _OPSET)
    model.ir_version = max(model.ir_version, _IR_VERSION)


def _int4(codes: NDArray[np.int8], name: str) -> onnx.TensorProto:
    """Two codes a byte, the first in the low nibble."""
    flat = np.ascontiguousarray(codes).ravel().view(np.uint8) & np.uint8(15)
    packed = flat[0::2] | flat[1::2] << np.uint8(4)
    return helper.make_tensor(name, TensorProto.INT4, codes.shape, packed.tobytes(), raw=True)
