"""From a stateless module to an ONNX graph without its matrices."""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import nn
from torch.export import Dim

from moa_export.targets.onnx_weights import take_matrices
from moa_runtime.bundle import TensorSpec
from moa_runtime.drafters.base import Float32

Specs = tuple[TensorSpec, ...]

# Sizes to trace with. All differ and none is 0 or 1, which the tracer would take for constants.
_TRACED_SIZES = {"T": 3, "Q": 2, "S": 5, "M": 7, "S+T": 8}


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
