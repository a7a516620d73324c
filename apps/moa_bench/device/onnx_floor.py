"""The floor on onnxruntime: one model that holds a graph's products with stored weights, each with its own input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from moa_bench.device.floor import Product
from moa_runtime.backends.onnx import ort, session_options
from moa_runtime.errors import MoaError

_KNOWN = ("MatMulNBits", "MatMul", "Gemm")


class OnnxFloor:
    """Implements :class:`moa_bench.device.floor.Floor`.

    Args:
        graph: the ``.onnx`` file of the device half.
        threads: processor threads, as for the backend.

    Raises:
        MoaError: see :func:`floor_model`.
    """

    def __init__(self, graph: Path, *, threads: int) -> None:
        model, self.products = floor_model(onnx.load(graph))
        self._session = ort.InferenceSession(
            model.SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"]
        )

    def prepare(self, tokens: int) -> Callable[[], object]:
        """See :meth:`moa_bench.device.floor.Floor.prepare`."""
        random = np.random.default_rng(0)
        # Bound outputs: inside the step, too, the products write into memory that is there already. A binding
        # does not keep numpy's arrays alive, so all memory is onnxruntime's own.
        binding = self._session.io_binding()
        for tensor, product in zip(self._session.get_inputs(), self.products, strict=True):
            rows = ort.OrtValue.ortvalue_from_shape_and_type((tokens, product.k), np.float32)
            rows.update_inplace(random.standard_normal((tokens, product.k), dtype=np.float32))
            binding.bind_ortvalue_input(tensor.name, rows)
        for tensor, product in zip(self._session.get_outputs(), self.products, strict=True):
            rows = ort.OrtValue.ortvalue_from_shape_and_type((tokens, product.n), np.float32)
            binding.bind_ortvalue_output(tensor.name, rows)
        return lambda: self._session.run_with_iobinding(binding)


def floor_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Product]]:
    """The products of ``model`` whose second factor is stored, in the order of the graph.

    Returns:
        a model with one input and one output for each product, and what they are.

    Raises:
        MoaError: a product with stored weights of a kind this function cannot take out of its graph, or none at all.
    """
    weights = _weights(model.graph)
    nodes: list[onnx.NodeProto] = []
    products, inputs, outputs, used = [], [], [], set[str]()
    for node in model.graph.node:
        if not _is_product(node, weights):
            continue
        product = _product(node, weights)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[0], copy.output[0] = f"input_{len(nodes)}", f"output_{len(nodes)}"
        nodes.append(copy)
        products.append(product)
        inputs.append(helper.make_tensor_value_info(copy.input[0], TensorProto.FLOAT, ("T", product.k)))
        outputs.append(helper.make_tensor_value_info(copy.output[0], TensorProto.FLOAT, ("T", product.n)))
        used.update(name for name in node.input[1:] if name)
    if not products:
        raise MoaError("the graph has no matrix product with stored weights, so its step has no floor")
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.output[0] in used]
    stored = {weights[name].name: weights[name] for name in used}
    graph = helper.make_graph([*casts, *nodes], "floor", inputs, outputs, list(stored.values()))
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version), products


def _weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Stored tensors by the names under which products find them: their own, or that of a Cast which widens them."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    casts = (node for node in graph.node if node.op_type == "Cast" and node.input[0] in stored)
    return stored | {node.output[0]: stored[node.input[0]] for node in casts}


def _is_product(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a node multiplies by stored weights. Raises MoaError: it does, but in a way not known here."""
    if not ("MatMul" in node.op_type or "Gemm" in node.op_type) or weights.keys().isdisjoint(node.input):
        return False
    computed = [name for name in node.input if name and name not in weights]
    if node.op_type not in _KNOWN or computed != [node.input[0]]:
        raise MoaError(
            f"the floor cannot hold the product {node.name!r} ({node.op_type}): it knows {', '.join(_KNOWN)} "
            "with one input that is computed, the first"
        )
    return True


def _product(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> Product:
    name = node.input[1]
    attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "MatMulNBits":
        return Product(name, attributes["K"], attributes["N"], attributes["bits"])
    matrix = weights[name]
    k, n = reversed(matrix.dims) if attributes.get("transB") else matrix.dims
    return Product(name, k, n, 8 * helper.tensor_dtype_to_np_dtype(matrix.data_type).itemsize)
