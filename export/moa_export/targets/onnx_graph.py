"""From a stateless module to an ONNX graph, and its matrices in fewer bits.

Matrices of 4 bits whose groups have a least value of their own are products in integers too. A group's weights are
``least + code * scale``. ``MatMulNBits`` has no fast form of that: with zero points that are not integers it widens the
matrix. So a product is split: ``x @ W`` is that of the codes around 8, in integers, plus that of each group's sum of
``x`` with the group's value at code 8, a 32nd of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer
from onnxscript import ir
from torch import nn
from torch.export import Dim

from moa_export.quantize import round_symmetric
from moa_export.recipe import Weights
from moa_runtime.bundle import TensorSpec
from moa_runtime.drafters.base import Float32

Specs = tuple[TensorSpec, ...]
# Sizes to trace with. All differ and none is 0 or 1, which the tracer would take for constants.
_TRACED_SIZES = {"T": 3, "Q": 2, "S": 5, "M": 7, "S+T": 8}
# ``accuracy_level`` of ``MatMulNBits``: the least precision of its activations (onnxruntime's contrib operators).
_FLOAT32_ACTIVATIONS, INT8_ACTIVATIONS = 1, 4
CONTRIB_DOMAIN, _CONTRIB_VERSION = "com.microsoft", 1
GROUP = 32
_CODES = 16


def trace(module: nn.Module, inputs: Specs, outputs: Specs) -> tuple[onnx.ModelProto, dict[str, Float32]]:
    """Trace a module.

    Returns:
        the model without the matrices it multiplies by, and these, as :func:`take_matrices` returns them.
    """
    dynamic = {s.name: {i: Dim.DYNAMIC for i, n in enumerate(s.shape) if isinstance(n, str)} for s in inputs}
    with torch.no_grad():
        program = torch.export.export(module, tuple(_example(spec) for spec in inputs), dynamic_shapes=dynamic)
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


def tidy(graph: Any, inputs: Specs, outputs: Specs) -> None:
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


def _example(spec: TensorSpec) -> torch.Tensor:
    sizes = [_TRACED_SIZES[n] if isinstance(n, str) else n for n in spec.shape]
    if spec.dtype == "int64":
        return torch.arange(sizes[0])
    return torch.ones(sizes, dtype=getattr(torch, spec.dtype))


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
            for added in reversed([*before, *_product_of_codes(node, name, matrix.shape)]):
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


def _product_of_codes(node: onnx.NodeProto, name: str, shape: tuple[int, ...]) -> list[onnx.NodeProto]:
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
