"""Export target ``web``: the device half as one ONNX file for onnxruntime-web, on a processor or a GPU.

A browser's build of onnxruntime multiplies floats many times faster than it multiplies by ``MatMulNBits``. So the file
holds codes and scales and a ``DequantizeLinear`` before a plain product, which a session that was made with
:data:`~moa_export.targets.web_engine.SESSION` computes once, when it loads the graph. Other chains of nodes (``Cast``,
``Mul``, ``Reshape``) are folded without a setting, but each of their results stays in memory until all matrices are
done: 3.3 GB for the built-in writer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from moa_drafter.config import DrafterConfig
from moa_drafter.device_module import TokenDeviceModule, signature, signature_of
from moa_drafter.drafter import TokenDrafter
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import Artifact, NotRun, StandIn, TargetOptions, refuse_without_rows
from moa_export.targets.onnx import TABLE, TOP_K, capture, check_writer, refuse_too_large
from moa_export.targets.onnx_graph import GROUP, Specs, product_with_offsets, round_with_offsets, tidy, trace
from moa_export.targets.web_engine import SESSION, WRITER_SESSION, WebBackend, find_engine
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.drafters.base import Float32

GRAPH_FILE, WRITER_FILE = "device_half.web.onnx", "writer.web.onnx"


class WebTarget:
    """See :class:`moa_export.targets.base.ExportTarget`.

    Stores integers and multiplies floats, whatever activations the recipe names: see :mod:`moa_export.targets.web`.
    """

    extra: ClassVar[str] = "export"

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe, self._options = recipe, options

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        refuse_without_rows("web", config)
        for part in ("linear", "head", "embedding"):
            weights = getattr(self._recipe, part)
            if weights.bits == 16:
                raise ExportError("web stores no float16, which not every browser's GPU knows: choose 4, 8 or 32 bits")
            if weights.is_integer and not weights.symmetric:
                raise ExportError(f"web stores the {part} weights without an offset: set symmetric for them")
        self._recipe.check_divides(config)
        refuse_too_large(config, self._recipe)

    def export(self, drafter: MoADrafter, folder: Path) -> list[Artifact]:
        """Write a single ONNX file."""
        recipe = self._recipe
        model, matrices = capture(drafter, recipe)
        for name, matrix in matrices.items():
            weights = recipe.head if matrix.shape[1] == drafter.config.draft_vocab_size else recipe.linear
            if weights.is_integer:
                put_rounded(model, name, matrix, weights)
            else:
                (place,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
                place.CopyFrom(numpy_helper.from_array(matrix, name))
        inputs, outputs = signature(drafter.config, recipe.top_k)
        return [_written("web", model, inputs, outputs, folder / GRAPH_FILE, SESSION)]

    def runner(self, folder: Path, artifact: Artifact) -> Backend | NotRun | StandIn:
        """onnxruntime-web in Node; where that is missing, onnxruntime in Python on the same graph."""
        return web_runner(folder, artifact, npm=self._options.npm)


def export_web_writer(model: TokenDrafter, bits: int, folder: Path) -> Artifact:
    """Write the offline writer into ``folder``, rounded as :func:`moa_export.targets.onnx.export_writer` does.

    Args:
        bits: of the layers' matrices, 4 or 8.

    Raises:
        ExportError: sizes that groups of 32 do not divide, or more than a file can hold.
    """
    check_writer(model, bits)
    half = TokenDeviceModule(model, top_k=TOP_K, embed=QuantisedEmbedding(model.embedding, TABLE)).eval()
    inputs, outputs = signature_of(half.kv_shape, half.top_k)
    graph, matrices = trace(half, inputs, outputs)
    for name, matrix in matrices.items():
        if matrix.shape[1] != len(model.head):
            if bits == 4:
                put_rounded_with_offsets(graph, name, matrix)
            else:
                put_rounded(graph, name, matrix, Weights(bits, TABLE.group_size))
        elif torch.equal(model.embedding, model.head):
            share_table(graph, name, matrix.shape)
        else:
            put_rounded(graph, name, matrix, TABLE)
    return _written("writer", graph, inputs, outputs, folder / WRITER_FILE, WRITER_SESSION)


def web_runner(folder: Path, artifact: Artifact, *, npm: bool) -> Backend | StandIn:
    """What runs a graph for onnxruntime-web: that itself in Node, or onnxruntime in Python in its place.

    Args:
        npm: whether npm may install onnxruntime-web.

    Raises:
        ExportError: npm fails, or onnxruntime-web does with this graph.
    """
    graph, engine = folder / artifact.file, find_engine(npm=npm)
    if isinstance(engine, NotRun):
        return StandIn(OnnxBackend(graph), engine.reason)
    return WebBackend(engine, graph, (*artifact.inputs, *artifact.outputs), artifact.details.get("session", SESSION))


def _written(
    name: str, model: onnx.ModelProto, inputs: Specs, outputs: Specs, file: Path, session: dict[str, Any]
) -> Artifact:
    widen_halves(model)
    tidy(model.graph, inputs, outputs)
    onnx.save(model, file)
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return Artifact(name, file.name, inputs, outputs, details={"opsets": opsets, "session": session})


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
