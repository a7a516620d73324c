"""From a stateless module to an ONNX graph, and its matrices in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer
from onnxscript import ir
from torch import nn
from torch.export import Dim

from moa_export.quantize import round_symmetric
from moa_export.recipe import Weights
from moa_export.targets.base import Specs, traced_inputs
from moa_runtime.drafters.base import Float32

# ``accuracy_level`` of ``MatMulNBits``: the least precision of its activations (onnxruntime's contrib operators).
_FLOAT32_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4
CONTRIB_DOMAIN, _CONTRIB_VERSION = "com.microsoft", 1
GROUP = 32


def trace(module: nn.Module, inputs: Specs, outputs: Specs) -> tuple[onnx.ModelProto, dict[str, Float32]]:
    """Trace a module.

    Returns:
        the model without the matrices it multiplies by, and these, as :func:`take_matrices` returns them.
    """
    dynamic = {s.name: {i: Dim.DYNAMIC for i, n in enumerate(s.shape) if isinstance(n, str)} for s in inputs}
    with torch.no_grad():
        program = torch.export.export(module, traced_inputs(inputs), dynamic_shapes=dynamic)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            external_data=False,
            verbose=False,
        )
    matrices = take_matrices(exported.model.graph)
    return exported.model_proto, matrices


def tidy(graph: onnx.GraphProto, inputs: Specs, outputs: Specs) -> None:
    """Give the varying sizes their names, and drop what tracing left: source paths and stale shapes."""
    del graph.value_info[:]
    del graph.metadata_props[:]
    for value, spec in zip([*graph.input, *graph.output], [*inputs, *outputs], strict=True):
        del value.metadata_props[:]
        for dim, size in zip(value.type.tensor_type.shape.dim, spec.shape, strict=True):
            if isinstance(size, str):
                dim.dim_param = size
    for item in [*graph.node, *graph.initializer]:
        del item.metadata_props[:]
        item.doc_string = ""


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


def put_matrix(
    model: onnx.ModelProto, name: str, matrix: Float32, weights: Weights, *, integer_activations: bool = True
) -> None:
    """Store a matrix in place of the initializer ``name``: integers in ``MatMulNBits``, else float32.

    Args:
        matrix: ``[inputs, outputs]``.
    """
    place = initializer(model.graph, name)
    if not weights.is_integer:
        place.CopyFrom(numpy_helper.from_array(matrix, name))
        return
    model.graph.initializer.remove(place)
    stored = _rounded(name, matrix, weights)
    model.graph.initializer.extend(stored)
    level = _INT8_ACTIVATIONS if integer_activations else _FLOAT32_ACTIVATIONS
    node, names = product_by(model.graph, name), [tensor.name for tensor in stored]
    node.CopyFrom(integer_product(node, names, matrix.shape, weights.bits, weights.group_size, level=level))
    allow_contrib_operators(model)


def product_by(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """Return the only product by the matrix ``name``."""
    (node,) = (node for node in graph.node if node.op_type == "MatMul" and node.input[1] == name)
    return node


def initializer(graph: onnx.GraphProto, name: str) -> TensorProto:
    """Return the stored tensor of this name."""
    return next(tensor for tensor in graph.initializer if tensor.name == name)


def set_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Put ``nodes``, among them nodes of the graph itself, in place of all its nodes."""
    del graph.node[:]
    graph.node.extend(nodes)


def allow_contrib_operators(model: onnx.ModelProto) -> None:
    """Let a graph use operators of onnxruntime's own."""
    if CONTRIB_DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(CONTRIB_DOMAIN, _CONTRIB_VERSION))


def integer_product(
    node: onnx.NodeProto,
    stored: Sequence[str],
    shape: tuple[int, ...],
    bits: int,
    group: int,
    *,
    level: int = _INT8_ACTIVATIONS,
) -> onnx.NodeProto:
    """Return ``node``, a product by a matrix ``[inputs, outputs]``, as one by codes.

    Args:
        stored: names of codes, scales and, if there are, zero points.
        shape: of the matrix.
        level: least precision of the activations.
    """
    return helper.make_node(
        "MatMulNBits",
        [node.input[0], *stored],
        [node.output[0]],
        name=f"{node.name}_Q{bits}",
        domain=CONTRIB_DOMAIN,
        K=shape[0],
        N=shape[1],
        bits=bits,
        block_size=group,
        accuracy_level=level,
    )


def _rounded(name: str, matrix: Float32, weights: Weights) -> list[TensorProto]:
    """Codes uint8 ``[outputs, groups, bytes]``, scales float32 ``[outputs, groups]``, and zero points if there are."""
    bits, group = weights.bits, weights.group_size
    if weights.symmetric:
        codes, scales = round_symmetric(torch.from_numpy(matrix.T), bits, group)
        # Stored without a sign, two 4-bit codes a byte, the first in the low nibble.
        stored = (codes.numpy().astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
        if bits == 4:
            stored = stored[:, 0::2] | stored[:, 1::2] << np.uint8(4)
        tensors = stored.reshape(*scales.shape, -1), scales.float().numpy()
    else:
        config = DefaultWeightOnlyQuantConfig(block_size=group, is_symmetric=False, bits=bits, accuracy_level=None)
        tensors = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(matrix))
    names = (f"{name}_Q{bits}", f"{name}_scales", f"{name}_zero_points")
    return [numpy_helper.from_array(tensor, label) for label, tensor in zip(names, tensors, strict=False)]


def halve_weights(model: onnx.ModelProto) -> None:
    """Store large float32 tensors as float16, each widened again by a Cast in front of its users."""
    graph = model.graph
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) < 4096:
            continue
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), f"{name}.half"))
        casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}.widen", to=TensorProto.FLOAT))
    set_nodes(graph, [*casts, *graph.node])
