"""Export target ``onnx``: the device half as one ONNX file with 8-bit weights, for onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from torch.export import Dim

from moa_drafter.config import DrafterConfig
from moa_drafter.model import MoADrafter
from moa_export.device_half import DeviceHalf, signature
from moa_export.recipe import Recipe
from moa_export.targets.base import Artifact, TargetOptions
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import TensorSpec

GRAPH_FILE = "device_half.onnx"
#: ``MatMulNBits``: quantise activations to int8 on the fly, so that the products run in integers.
_INT8_ACTIVATIONS = 4
# Sizes to trace with. All differ and none is 0 or 1, which the tracer would take for constants.
_TRACED_SIZES = {"T": 3, "Q": 2, "S": 5, "M": 7, "S+T": 8}


class OnnxTarget:
    """See :class:`moa_export.targets.base.ExportTarget`."""

    extra: ClassVar[str] = "export"

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe = recipe

    def check(self, config: DrafterConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""

    def export(self, drafter: MoADrafter, folder: Path) -> list[Artifact]:
        """Write a single ONNX file."""
        model = capture(drafter, self._recipe)
        if self._recipe.linear.is_integer:
            model = quantise_weights(model, self._recipe)
        inputs, outputs = signature(drafter.config, self._recipe.top_k)
        _tidy(model.graph, inputs, outputs)
        onnx.save(model, folder / GRAPH_FILE)
        return [Artifact("onnx", GRAPH_FILE, inputs, outputs)]

    def runner(self, folder: Path, artifact: Artifact) -> Backend:
        """onnxruntime on the CPU."""
        return OnnxBackend(folder / artifact.file)


def capture(drafter: MoADrafter, recipe: Recipe) -> onnx.ModelProto:
    """Trace the device half into an ONNX model with float32 weights and a quantised embedding."""
    half = DeviceHalf(drafter, embedding_bits=recipe.embedding.bits, top_k=recipe.top_k).eval()
    inputs, outputs = signature(drafter.config, recipe.top_k)
    dynamic = {s.name: {i: Dim.DYNAMIC for i, n in enumerate(s.shape) if isinstance(n, str)} for s in inputs}
    with torch.no_grad():
        program = torch.export.export(half, tuple(_example(spec) for spec in inputs), dynamic_shapes=dynamic)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            external_data=False,
            verbose=False,
        )
    return exported.model_proto


def quantise_weights(model: onnx.ModelProto, recipe: Recipe) -> onnx.ModelProto:
    """Linear layers and the head to ``weight_bits`` in groups of ``group_size``, symmetric."""
    wrapped = ONNXModel(model)
    wrapped.replace_gemm_with_matmul()  # the quantiser knows MatMul only
    del wrapped.model.graph.value_info[:]  # shapes of the transposed weights are no longer true
    quantiser = MatMulNBitsQuantizer(
        wrapped.model,
        bits=recipe.linear.bits,
        block_size=recipe.linear.group_size,
        is_symmetric=True,
        accuracy_level=_INT8_ACTIVATIONS,
    )
    quantiser.process()
    return quantiser.model.model


def _example(spec: TensorSpec) -> torch.Tensor:
    sizes = [_TRACED_SIZES[n] if isinstance(n, str) else n for n in spec.shape]
    if spec.dtype == "int64":
        return torch.arange(sizes[0])
    return torch.ones(sizes, dtype=getattr(torch, spec.dtype))


def _tidy(graph: Any, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
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
