"""Stored weights of an ONNX graph in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from moa_export.recipe import Weights
from moa_export.rounding import round_symmetric

# ``accuracy_level`` of ``MatMulNBits``: the least precision of its activations (onnxruntime's contrib operators).
_FLOAT32_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4


def quantise_products(
    model: onnx.ModelProto, linear: Weights, head: Weights, *, head_size: int, integer_activations: bool
) -> onnx.ModelProto:
    """Products with stored matrices to ``MatMulNBits``, where their part of the recipe has integers.

    Args:
        head_size: outputs of the draft head, which tells it from the layers' matrices.
    """
    matrices = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) == 2}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in matrices]
    heads = {node.name for node in products if matrices[node.input[1]][1] == head_size}
    for weights, names in ((head, heads), (linear, {node.name for node in products} - heads)):
        if weights.is_integer:
            model = _quantise(model, weights, sorted(names), integer_activations)
    return model


def _quantise(
    model: onnx.ModelProto, weights: Weights, names: Sequence[str], integer_activations: bool
) -> onnx.ModelProto:
    del model.graph.value_info[:]  # shapes of the transposed weights are no longer true
    others = [node.name for node in model.graph.node if node.op_type == "MatMul" and node.name not in names]
    quantiser = MatMulNBitsQuantizer(
        model,
        bits=weights.bits,
        block_size=weights.group_size,
        is_symmetric=weights.symmetric,
        accuracy_level=_INT8_ACTIVATIONS if integer_activations else _FLOAT32_ACTIVATIONS,
        nodes_to_exclude=others,
    )
    originals = {tensor.name: tensor for tensor in model.graph.initializer}
    matrices = {node.name: originals[node.input[1]] for node in model.graph.node if node.name in names}
    quantiser.process()
    rounded = quantiser.model.model
    if weights.symmetric:
        _put_codes(rounded.graph, [matrices[name] for name in names], weights)
    return rounded


def _put_codes(graph: onnx.GraphProto, matrices: Sequence[onnx.TensorProto], weights: Weights) -> None:
    """Replace what the quantiser stored: it fits each scale to the largest weight of its group."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for matrix in matrices:
        weight = torch.from_numpy(numpy_helper.to_array(matrix).T.copy())
        codes, scales = (found.numpy() for found in round_symmetric(weight, weights.bits, weights.group_size))
        # Stored without a sign, two 4-bit codes a byte, the first in the low nibble.
        stored = (codes.astype(np.int16) + 2 ** (weights.bits - 1)).astype(np.uint8)
        if weights.bits == 4:
            stored = stored[:, 0::2] | stored[:, 1::2] << np.uint8(4)
        for name, values in ((f"{matrix.name}_Q{weights.bits}", stored), (f"{matrix.name}_scales", scales)):
            old = numpy_helper.to_array(tensors[name])
            tensors[name].CopyFrom(numpy_helper.from_array(values.astype(old.dtype).reshape(old.shape), name))


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
