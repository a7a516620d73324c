"""Graphs as files of a bundle: the device half and the offline writer, for onnxruntime and for onnxruntime-web.

A browser's build of onnxruntime multiplies floats many times faster than it multiplies by ``MatMulNBits``. So files for
it hold codes and scales and a ``DequantizeLinear`` before a plain product, which a session that was made with
:data:`SESSION` computes once, when it loads the graph. Other chains of nodes (``Cast``, ``Mul``, ``Reshape``) are
folded without a setting, but each of their results stays in memory until all matrices are done: 3.3 GB for the
built-in writer.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.graph_builder import Port
from moa_decoder.matrix import GROUP
from moa_decoder.rounded_weights import RoundedWeights
from moa_decoder.web_builder import WebBuilder
from moa_decoder.weights import DecoderWeights, LayerMatrix, shapes_of
from moa_decoder.writer_graph import WriterGraph
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig, longest_context
from moa_export.device_graph import DeviceGraph
from moa_export.device_parts import DeviceParts
from moa_export.errors import ExportError
from moa_export.recipe import Recipe
from moa_runtime.manifest import TargetEntry, TensorSpec

GRAPH_FILE, WEB_GRAPH_FILE = "device_half.onnx", "device_half.web.onnx"
WRITER_FILE, WEB_WRITER_FILE = "writer.onnx", "writer.web.onnx"
#: Names of the graphs of a writer in messages: for onnxruntime, and for onnxruntime-web.
WRITER, WEB_WRITER = "writer", "web writer"
#: Status of a check that was not made, and why if it could have been.
NOT_RUN, NOT_ASKED = "not run", "no checks were asked for; moa-export verify makes them"
#: In place of a writer's name: the target itself.
TARGET = "target"
#: Candidates for each next token of a writer: what it samples from.
TOP_K = 16
_HEAD_STEP = 8  # of GroupQueryAttention
_MOST_BYTES = 2**31  # of a file in the format of Protocol Buffers


def _session(**more: str) -> dict[str, Any]:
    return {"graphOptimizationLevel": "all", "extra": {"session": {"disable_quant_qdq": "1", **more}}}


#: Options of onnxruntime-web for a graph. Without them it is slow.
SESSION = _session()
#: The same for a writer, whose floats are not laid out for products once more: less memory, steps twice as long.
WRITER_SESSION = _session(disable_prepacking="1")


def write_half(parts: DeviceParts, recipe: Recipe, folder: Path) -> TargetEntry:
    """Write a device half for onnxruntime into ``folder``."""
    return _written(DeviceGraph(parts, recipe), folder / GRAPH_FILE)


def write_web_half(parts: DeviceParts, recipe: Recipe, folder: Path) -> TargetEntry:
    """Write a device half for onnxruntime-web into ``folder``."""
    return _written(DeviceGraph(parts, recipe, WebBuilder), folder / WEB_GRAPH_FILE, session=SESSION)


def write_writer(weights: RoundedWeights, folder: Path) -> TargetEntry:
    """Write a whole model, the offline writer, for onnxruntime into ``folder``.

    Raises:
        ExportError: sizes that onnxruntime's operators do not take, or more than a file can hold.
    """
    check_writer(weights)
    return _written(WriterGraph(weights, top_k=TOP_K, in_place=True), folder / WRITER_FILE)


def write_web_writer(weights: RoundedWeights, folder: Path) -> TargetEntry:
    """Write the offline writer for onnxruntime-web into ``folder``. Raises ExportError, see :func:`write_writer`."""
    check_writer(weights)
    graph = WriterGraph(weights, top_k=TOP_K, in_place=False, builder=WebBuilder)
    return _written(graph, folder / WEB_WRITER_FILE, session=WRITER_SESSION)


def writer_bits(weights: DecoderWeights) -> int:
    """Return the most bits of a layer's matrix: 4 or 8 of a quantised GGUF file, else 32."""
    if isinstance(weights, CheckpointWeights):
        return weights.bits
    layers, names = range(len(weights.spec.layers)), get_args(LayerMatrix)
    return max(weights.matrix(layer, name).bits for layer in layers for name in names)


def writer_name(target: str) -> str:
    """Return the name in messages of an export target's writer; with ``_`` for spaces, its field in the manifest."""
    return WRITER if target == "onnx" else f"{target} {WRITER}"


def usual_bits(weights: DecoderWeights) -> int:
    """Return the bits of a writer's layers if none were asked for: a quantised GGUF file's own, else 4."""
    most = writer_bits(weights)
    return 4 if most == 32 else most


def not_checked(*checks: str) -> dict[str, dict[str, Any]]:
    """Return what a manifest says of checks that were not asked for."""
    return {name: {"status": NOT_RUN, "reason": NOT_ASKED} for name in checks}


def writer_details(entry: TargetEntry, model: str, bits: int, config: Any) -> dict[str, Any]:
    """Return what a manifest says of a writer: a model's name or :data:`TARGET`, and of its configuration."""
    longest, _ = longest_context(config)
    return {"model": model, "bits": bits, "max_context": longest, **entry.details}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


def _written(graph: DeviceGraph | WriterGraph, file: Path, **details: Any) -> TargetEntry:
    onnx.save(graph.model, file)
    inputs, outputs = _specs(graph.inputs), _specs(graph.outputs)
    return TargetEntry(file.name, file.stat().st_size, inputs, outputs, details=details)


def _specs(ports: Mapping[str, Port]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, np.dtype(kind).name, tuple(shape)) for name, (kind, shape) in ports.items())


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


def check_writer(weights: RoundedWeights) -> None:
    """Raise the ExportErrors of :func:`write_writer`."""
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
