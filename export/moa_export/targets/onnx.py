"""Export target ``onnx``: the device half, or the offline model, as one ONNX file for onnxruntime on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from moa_decoder.rounded_weights import RoundedWeights
from moa_decoder.weights import shapes_of
from moa_decoder.writer_graph import WriterGraph
from moa_drafter.architectures.eagle3 import Eagle3Drafter, Eagle3Module
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig
from moa_drafter.device_module import DeviceModule, TokenDeviceModule, signature
from moa_drafter.drafter import Drafter, TokenDrafter
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding
from moa_export.recipe import Recipe
from moa_export.targets.base import Specs, TargetOptions, entry_of
from moa_export.targets.onnx_graph import GROUP, halve_weights, put_matrix, tidy, trace
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import eagle3_backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.drafters.base import Float32
from moa_runtime.manifest import TargetEntry, TensorSpec

GRAPH_FILE = "device_half.onnx"
WRITER_FILE = "writer.onnx"
#: Candidates for each next token: what it samples from.
TOP_K = 16
_HEAD_STEP = 8  # of GroupQueryAttention
_MOST_BYTES = 2**31  # of a file in the format of Protocol Buffers


class OnnxTarget:
    """See :class:`moa_export.targets.base.ExportTarget`.

    Integer weights become ``MatMulNBits``, whose activations are rounded to int8 in groups of the same size, so
    that products run in integers. 16 bits halve the file; onnxruntime widens the weights when it loads them.
    """

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe = recipe

    def check(self, config: DrafterConfig | TokenConfig | Eagle3Config) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        for part in (self._recipe.linear, self._recipe.head):
            if part.is_integer and part.group_size not in (16, 32, 64, 128, 256):
                reason = f"onnx takes group sizes of 16, 32, 64, 128 or 256, not {part.group_size}"
                raise ExportError(reason, code="unsupported_group")
        self._recipe.check_divides(config)
        refuse_too_large(config, self._recipe)

    def export(self, drafter: Drafter, folder: Path) -> dict[str, TargetEntry]:
        """Write a single ONNX file."""
        recipe = self._recipe
        model, matrices = capture(drafter, recipe)
        integers, head_size = recipe.activation_bits == 8, drafter.config.draft_vocab_size
        for name, matrix in _head_first(matrices, head_size):
            weights = recipe.head if matrix.shape[1] == head_size else recipe.linear
            put_matrix(model, name, matrix, weights, integer_activations=integers)
        if 16 in (recipe.linear.bits, recipe.head.bits, recipe.embedding.bits):
            halve_weights(model)
        inputs, outputs = signature(drafter.config, recipe.top_k)
        opsets = save(model, inputs, outputs, folder / GRAPH_FILE)
        return {"onnx": entry_of(folder / GRAPH_FILE, inputs, outputs, details={"opsets": opsets})}

    def runner(self, folder: Path, entry: TargetEntry) -> Backend:
        """Load the graph into onnxruntime on the CPU."""
        if any(spec.name == "features" for spec in entry.inputs):
            return eagle3_backend(folder / entry.file)
        return OnnxBackend(folder / entry.file)


def _head_first(matrices: Mapping[str, Float32], outputs: int) -> list[tuple[str, Float32]]:
    """Return the matrices by name, first the head's, which has ``outputs`` columns, then the layers'."""
    return sorted(matrices.items(), key=lambda item: item[1].shape[1] != outputs)


def save(model: onnx.ModelProto, inputs: Specs, outputs: Specs, file: Path) -> dict[str, int]:
    """Write a traced graph; return the versions of its operator sets by their names."""
    tidy(model.graph, inputs, outputs)
    onnx.save(model, file)
    return {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}


def capture(drafter: Drafter, recipe: Recipe) -> tuple[onnx.ModelProto, dict[str, Float32]]:
    """Trace the device half into an ONNX model; the embedding may be quantised already.

    Returns:
        the model without the matrices it multiplies by, and these, as :func:`take_matrices` returns them.
    """
    weights = recipe.embedding
    embed = QuantisedEmbedding(drafter.embedding, weights) if weights.is_integer else None
    kind = TokenDeviceModule if isinstance(drafter, TokenDrafter) else DeviceModule
    if isinstance(drafter, Eagle3Drafter):
        kind = Eagle3Module
    half = kind(drafter, top_k=recipe.top_k, embed=embed).eval()
    inputs, outputs = signature(drafter.config, recipe.top_k)
    return trace(half, inputs, outputs)


def refuse_too_large(config: DrafterConfig | TokenConfig | Eagle3Config, recipe: Recipe) -> None:
    """Raise an ExportError if an ONNX file cannot hold the weights, even without their scales."""
    layer = config.decoder
    heads = layer.head_dim * (layer.num_heads + layer.num_kv_heads)
    matrices = layer.hidden_size * (2 * heads + 3 * layer.intermediate_size)
    if isinstance(config, Eagle3Config):  # queries, keys and values of twice the width
        matrices += layer.hidden_size * (heads + layer.head_dim * layer.num_kv_heads)
    counts = (
        (recipe.linear, config.step_layers * matrices),
        (recipe.head, config.draft_vocab_size * layer.hidden_size),
        (recipe.embedding, config.vocab_size * layer.hidden_size),
    )
    size = sum(weights.bits / 8 * count for weights, count in counts)
    if size > _MOST_BYTES:
        reason = (
            f"the drafter takes {size / 1e9:.1f} GB in these widths, and an ONNX file holds 2 GB: choose fewer bits"
        )
        raise ExportError(reason, code="too_large")


def export_writer(weights: RoundedWeights, folder: Path) -> TargetEntry:
    """Write a whole model, the offline writer, into ``folder``.

    Raises:
        ExportError: sizes that onnxruntime's operators do not take, or more than a file can hold.
    """
    check_writer(weights)
    return write_graph(WriterGraph(weights, top_k=TOP_K, in_place=True), folder / WRITER_FILE)


def write_graph(graph: WriterGraph, file: Path, **details: Any) -> TargetEntry:
    """Write the offline writer's graph; return its entry with ``details``."""
    onnx.save(graph.model, file)
    inputs, outputs = (
        tuple(TensorSpec(name, np.dtype(kind).name, tuple(shape)) for name, (kind, shape) in ports.items())
        for ports in (graph.inputs, graph.outputs)
    )
    return entry_of(file, inputs, outputs, details=details)


def check_writer(weights: RoundedWeights) -> None:
    """Raise the ExportErrors of :func:`export_writer`."""
    spec = weights.spec
    shapes = [shape for layer in spec.layers for shape in shapes_of(layer, spec.hidden_size).values() if len(shape) > 1]
    if odd := sorted({inputs for _, inputs in shapes if inputs % GROUP}):
        reason = f"the offline writer is rounded in groups of {GROUP}, which do not divide its width of {odd[0]}"
        raise ExportError(reason, code="unsupported_group")
    heads = sorted({layer.head_dim for layer in spec.layers})
    if len(heads) > 1 or heads[0] % _HEAD_STEP:
        said = " and ".join(map(str, heads))
        reason = f"the heads of an offline writer have one size, a multiple of {_HEAD_STEP}, not {said}"
        raise ExportError(reason, code="unsupported_model")
    numbers = sum(outputs * inputs for outputs, inputs in shapes)
    size = numbers * weights.bits / 8 + 2 * spec.vocab_size * spec.hidden_size * weights.table_bits / 8
    if size > _MOST_BYTES:
        raise ExportError(
            f"the offline model takes {size / 1e9:.1f} GB in {weights.bits} bits, and an ONNX file holds 2 GB: choose "
            "a smaller one with --offline-model, or none",
            code="too_large",
        )
