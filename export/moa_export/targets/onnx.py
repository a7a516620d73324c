"""Export target ``onnx``: the device half as one ONNX file, for onnxruntime on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import onnx

from moa_drafter.checkpoint import DeviceDrafter
from moa_drafter.config import DrafterConfig, TokenConfig
from moa_drafter.device_module import DeviceModule, TokenDeviceModule, signature
from moa_drafter.drafter import TokenDrafter
from moa_export.errors import ExportError
from moa_export.quantized_embedding import QuantisedEmbedding
from moa_export.recipe import Recipe
from moa_export.targets.base import Artifact, TargetOptions
from moa_export.targets.onnx_graph import tidy, trace
from moa_export.targets.onnx_weights import halve_weights, put_matrices
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.drafters.base import Float32

GRAPH_FILE = "device_half.onnx"
_MOST_BYTES = 2**31  # of a file in the format of Protocol Buffers


class OnnxTarget:
    """See :class:`moa_export.targets.base.ExportTarget`.

    Integer weights become ``MatMulNBits``, whose activations are rounded to int8 in groups of the same size, so
    that products run in integers. 16 bits halve the file; onnxruntime widens the weights when it loads them.
    """

    extra: ClassVar[str] = "export"

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe = recipe

    def check(self, config: DrafterConfig | TokenConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        for part in (self._recipe.linear, self._recipe.head):
            if part.is_integer and part.group_size not in (16, 32, 64, 128, 256):
                raise ExportError(f"onnx takes group sizes of 16, 32, 64, 128 or 256, not {part.group_size}")
        self._recipe.check_divides(config)
        refuse_too_large(config, self._recipe)

    def export(self, drafter: DeviceDrafter, folder: Path) -> list[Artifact]:
        """Write a single ONNX file."""
        recipe = self._recipe
        model, matrices = capture(drafter, recipe)
        put_matrices(
            model,
            matrices,
            recipe.linear,
            recipe.head,
            head_size=drafter.config.draft_vocab_size,
            integer_activations=recipe.activation_bits == 8,
        )
        if 16 in (recipe.linear.bits, recipe.head.bits, recipe.embedding.bits):
            halve_weights(model)
        inputs, outputs = signature(drafter.config, recipe.top_k)
        tidy(model.graph, inputs, outputs)
        onnx.save(model, folder / GRAPH_FILE)
        opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
        return [Artifact("onnx", GRAPH_FILE, inputs, outputs, details={"opsets": opsets})]

    def runner(self, folder: Path, artifact: Artifact) -> Backend:
        """onnxruntime on the CPU."""
        return OnnxBackend(folder / artifact.file)


def capture(drafter: DeviceDrafter, recipe: Recipe) -> tuple[onnx.ModelProto, dict[str, Float32]]:
    """Trace the device half into an ONNX model; the embedding may be quantised already.

    Returns:
        the model without the matrices it multiplies by, and these, as :func:`take_matrices` returns them.
    """
    weights = recipe.embedding
    embed = QuantisedEmbedding(drafter.embedding, weights) if weights.is_integer else None
    kind = TokenDeviceModule if isinstance(drafter, TokenDrafter) else DeviceModule
    half = kind(drafter, top_k=recipe.top_k, embed=embed).eval()
    inputs, outputs = signature(drafter.config, recipe.top_k)
    return trace(half, inputs, outputs)


def refuse_too_large(config: DrafterConfig | TokenConfig, recipe: Recipe) -> None:
    """Raises ExportError: weights that an ONNX file cannot hold, even without their scales."""
    layer = config.decoder
    heads = layer.head_dim * (layer.num_heads + layer.num_kv_heads)
    matrices = layer.hidden_size * (2 * heads + 3 * layer.intermediate_size)
    counts = (
        (recipe.linear, config.step_layers * matrices),
        (recipe.head, config.draft_vocab_size * layer.hidden_size),
        (recipe.embedding, config.vocab_size * layer.hidden_size),
    )
    size = sum(weights.bits / 8 * count for weights, count in counts)
    if size > _MOST_BYTES:
        raise ExportError(
            f"the drafter takes {size / 1e9:.1f} GB in these widths, and an ONNX file holds 2 GB: choose fewer bits"
        )
