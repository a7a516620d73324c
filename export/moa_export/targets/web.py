"""Export target ``web``: the device half as one ONNX file for onnxruntime-web, on a processor or a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch
from onnx import numpy_helper

from moa_drafter.config import DrafterConfig
from moa_drafter.device_module import TokenDeviceModule, signature, signature_of
from moa_drafter.drafter import TokenDrafter
from moa_drafter.model import MoADrafter
from moa_export.errors import ExportError
from moa_export.quantized_embedding import QuantisedEmbedding
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import Artifact, NotRun, StandIn, TargetOptions, refuse_without_rows
from moa_export.targets.onnx import capture, refuse_too_large
from moa_export.targets.onnx_graph import Specs, tidy, trace
from moa_export.targets.onnx_writer import TABLE, TOP_K, check_writer
from moa_export.targets.web_engine import WebBackend, find_engine
from moa_export.targets.web_weights import (
    SESSION,
    WRITER_SESSION,
    put_rounded,
    put_rounded_with_offsets,
    share_table,
    widen_halves,
)
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend

GRAPH_FILE, WRITER_FILE = "device_half.web.onnx", "writer.web.onnx"


class WebTarget:
    """See :class:`moa_export.targets.base.ExportTarget`.

    Integers are stored, floats are multiplied, whatever the recipe says of activations: see
    :mod:`moa_export.targets.web_weights`.
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
    """Write the offline writer into ``folder``, rounded as :func:`moa_export.targets.onnx_writer.export_writer` does.

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
