"""Stored weights of an ONNX graph in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer
from onnxscript import ir

from moa_export.quantize import round_symmetric
from moa_export.recipe import Weights
from moa_runtime.drafters.base import Float32

# ``accuracy_level`` of ``MatMulNBits``: the least precision of its activations (onnxruntime's contrib operators).
_FLOAT32_ACTIVATIONS, INT8_ACTIVATIONS = 1, 4
CONTRIB_DOMAIN, _CONTRIB_VERSION = "com.microsoft", 1


def take_matrices(graph: ir.Graph) -> dict[str, Float32]:
    """Take the matrices that a traced graph multiplies by out of it, and leave empty ones in their places.

    A traced graph refers to PyTorch's memory. Written out whole, it would cost as much memory again. Products that were
    traced as ``Gemm``, by the transposed matrix and without a bias, become ``MatMul``, which stands for all hereafter.

    Returns:
        by the names of the initializers, ``[inputs, outputs]`` each.

    Raises:
        ValueError: a product with a bias, which no device half has.
    """
    matrices = {}
    for node in graph:
        if node.op_type not in ("Gemm", "MatMul") or not (stored := node.inputs[1]).is_initializer():
            continue
        array = stored.const_value.numpy()
        matrices[stored.name] = array.T if node.attributes.get_int("transB", 0) else array
        if node.op_type == "Gemm":
            if len(node.inputs) > 2:
                raise ValueError(f"{node.name} adds a bias")
            node.op_type = "MatMul"
            node.attributes.clear()
        stored.const_value = ir.tensor(np.empty((0, 0), np.float32), name=stored.name)
    return matrices


def put_matrices(
    model: onnx.ModelProto,
    matrices: Mapping[str, Float32],
    linear: Weights,
    head: Weights,
    *,
    head_size: int,
    integer_activations: bool,
) -> None:
    """Store matrices in a graph: in ``MatMulNBits`` where their part of the recipe has integers, else in float32.

    Args:
        matrices: as :func:`take_matrices` returns them.
        head_size: outputs of the draft head, which tells it from the layers' matrices.
    """
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
    heads = [node for node in products if matrices[node.input[1]].shape[1] == head_size]
    layers = [node for node in products if node not in heads]
    for weights, nodes in ((head, heads), (linear, layers)):
        for node in nodes:
            name = node.input[1]
            (place,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
            if not weights.is_integer:
                place.CopyFrom(numpy_helper.from_array(matrices[name], name))
                continue
            model.graph.initializer.remove(place)
            stored = _rounded(name, matrices[name], weights)
            model.graph.initializer.extend(stored)
            node.CopyFrom(_product(node, stored, matrices[name].shape, weights, integer_activations))
    if head.is_integer or linear.is_integer:
        with_contrib_operators(model)


def with_contrib_operators(model: onnx.ModelProto) -> None:
    """Let a graph use operators of onnxruntime's own."""
    if CONTRIB_DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(CONTRIB_DOMAIN, _CONTRIB_VERSION))


def _product(
    node: onnx.NodeProto,
    stored: list[onnx.TensorProto],
    shape: tuple[int, ...],
    weights: Weights,
    integer_activations: bool,
) -> onnx.NodeProto:
    return onnx.helper.make_node(
        "MatMulNBits",
        [node.input[0], *(tensor.name for tensor in stored)],
        list(node.output),
        name=f"{node.name}_Q{weights.bits}",
        domain=CONTRIB_DOMAIN,
        K=shape[0],
        N=shape[1],
        bits=weights.bits,
        block_size=weights.group_size,
        accuracy_level=INT8_ACTIVATIONS if integer_activations else _FLOAT32_ACTIVATIONS,
    )


def _rounded(name: str, matrix: Float32, weights: Weights) -> list[onnx.TensorProto]:
    """Codes uint8 ``[outputs, groups, bytes]``, scales float32 ``[outputs, groups]``, and zero points if there are."""
    tensors = _symmetric(matrix, weights) if weights.symmetric else _asymmetric(matrix, weights)
    names = (f"{name}_Q{weights.bits}", f"{name}_scales", f"{name}_zero_points")
    return [numpy_helper.from_array(tensor, label) for label, tensor in zip(names, tensors, strict=False)]


def _symmetric(matrix: Float32, weights: Weights) -> tuple[NDArray[np.generic], ...]:
    codes, scales = round_symmetric(torch.from_numpy(matrix.T), weights.bits, weights.group_size)
    # Stored without a sign, two 4-bit codes a byte, the first in the low nibble.
    stored = (codes.numpy().astype(np.int16) + 2 ** (weights.bits - 1)).astype(np.uint8)
    if weights.bits == 4:
        stored = stored[:, 0::2] | stored[:, 1::2] << np.uint8(4)
    return stored.reshape(*scales.shape, -1), scales.float().numpy()


def _asymmetric(matrix: Float32, weights: Weights) -> tuple[NDArray[np.generic], ...]:
    config = DefaultWeightOnlyQuantConfig(
        block_size=weights.group_size, is_symmetric=False, bits=weights.bits, accuracy_level=None
    )
    return DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(matrix))


def halve_weights(model: onnx.ModelProto) -> None:
    """Store large float32 tensors as float16, each widened again by a Cast in front of its users."""
    graph = model.graph
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or np.prod(tensor.dims) < 4096:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{name}.half"))
        casts.append(
            onnx.helper.make_node("Cast", [tensor.name], [name], name=f"{name}.widen", to=onnx.TensorProto.FLOAT)
        )
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*casts, *nodes])
