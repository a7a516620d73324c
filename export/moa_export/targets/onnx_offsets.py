"""Matrices of 4 bits whose groups have a least value of their own, as products that run in integers.

A group's weights are ``least + code * scale``. ``MatMulNBits`` has no such form that is fast: with zero points that are
no integers it widens the matrix. So a product is split: ``x @ W`` is that of the codes around 8, in integers, plus that
of each group's sum of ``x`` with the group's value at code 8, a 32nd of the work.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from moa_export.targets.onnx_weights import CONTRIB_DOMAIN, INT8_ACTIVATIONS, with_contrib_operators
from moa_runtime.drafters.base import Float32

GROUP = 32
_CODES = 16


def round_with_offsets(matrix: Float32) -> tuple[NDArray[np.uint8], Float32, Float32]:
    """Round ``[inputs, outputs]`` group by group along the inputs, between the least and the largest of each group.

    What lies on such a grid already, as Q4_1 of GGUF does, is represented exactly: its extremes are in use.

    Returns:
        codes ``[outputs, groups, 32]``, scales and least values ``[outputs, groups]``, which fit into float16.
    """
    groups = np.ascontiguousarray(matrix.T).reshape(matrix.shape[1], -1, GROUP)
    least, largest = groups.min(axis=2), groups.max(axis=2)
    least = least.astype(np.float16).astype(np.float32)
    scales = ((largest - least) / (_CODES - 1)).astype(np.float16).astype(np.float32)
    steps = np.where(scales == 0, 1, scales)
    codes = np.rint((groups - least[:, :, None]) / steps[:, :, None]).clip(0, _CODES - 1)
    return codes.astype(np.uint8), scales, least


def put_with_offsets(model: onnx.ModelProto, name: str, matrix: Float32) -> None:
    """Put a matrix in place of the initializer ``name``, in all products by it."""
    codes, scales, least = round_with_offsets(matrix)
    graph = model.graph
    (place,) = (tensor for tensor in graph.initializer if tensor.name == name)
    graph.initializer.remove(place)
    packed = codes[:, :, 0::2] | codes[:, :, 1::2] << np.uint8(4)
    stored = {
        f"{name}_Q4": packed,
        f"{name}_scales": scales.astype(np.float16),
        f"{name}_least": least.T.astype(np.float16),
    }
    graph.initializer.extend(numpy_helper.from_array(np.ascontiguousarray(a), label) for label, a in stored.items())
    before = _offsets(name)
    for node in list(graph.node):
        if node.op_type == "MatMul" and node.input[1] == name:
            at = list(graph.node).index(node)
            graph.node.remove(node)
            for added in reversed([*before, *_product(node, name, matrix.shape)]):
                graph.node.insert(at, added)
            before = []
    with_contrib_operators(model)


def _offsets(name: str) -> list[onnx.NodeProto]:
    """Each group's value at code 8, ``[groups, outputs]``; onnxruntime computes it once, when it loads the graph."""
    node, of = helper.make_node, f"{name}_offsets"
    constant = node("Constant", [], [f"{of}.8"], name=f"{of}.Constant", value_float=8.0)
    return [
        node("Cast", [f"{name}_scales"], [f"{of}.scales"], name=f"{of}.widen", to=onnx.TensorProto.FLOAT),
        node("Cast", [f"{name}_least"], [f"{of}.least"], name=f"{of}.widen_least", to=onnx.TensorProto.FLOAT),
        constant,
        node("Transpose", [f"{of}.scales"], [f"{of}.turned"], name=f"{of}.turn", perm=[1, 0]),
        node("Mul", [f"{of}.turned", f"{of}.8"], [f"{of}.middle"], name=f"{of}.Mul"),
        node("Add", [f"{of}.middle", f"{of}.least"], [of], name=f"{of}.Add"),
    ]


def _product(node: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> list[onnx.NodeProto]:
    """``[T, inputs] @ [inputs, outputs]``."""
    inputs, outputs = shape
    codes = helper.make_node(
        "MatMulNBits",
        [node.input[0], f"{name}_Q4", f"{name}_offsets.scales"],
        [f"{node.name}.codes"],
        name=f"{node.name}_Q4",
        domain=CONTRIB_DOMAIN,
        K=inputs,
        N=outputs,
        bits=4,
        block_size=GROUP,
        accuracy_level=INT8_ACTIVATIONS,
    )
    return [codes, *product_with_offsets(node, f"{node.name}.codes", f"{name}_offsets", inputs)]


def product_with_offsets(node: onnx.NodeProto, codes: str, offsets: str, inputs: int) -> list[onnx.NodeProto]:
    """Nodes for the output of ``node``, a product of ``x [T, inputs]``: to that by the codes they add
    each group's sum of ``x`` times its offset.

    Args:
        codes: name of the product by the codes, ``[T, outputs]``.
        offsets: name of ``[groups, outputs]``, each group's value at the code that counts as 0.
    """
    make, of, x = helper.make_node, node.name, node.input[0]
    split, axis = f"{of}.split", f"{of}.axis"
    return [
        make("Constant", [], [split], name=f"{split}.Constant", value_ints=[-1, inputs // GROUP, GROUP]),
        make("Reshape", [x, split], [f"{of}.groups"], name=f"{of}.Reshape"),
        make("Constant", [], [axis], name=f"{axis}.Constant", value_ints=[2]),
        make("ReduceSum", [f"{of}.groups", axis], [f"{of}.sums"], name=f"{of}.ReduceSum", keepdims=0),
        make("MatMul", [f"{of}.sums", offsets], [f"{of}.offsets"], name=f"{of}.MatMul"),
        make("Add", [codes, f"{of}.offsets"], list(node.output), name=f"{of}.Add"),
    ]
