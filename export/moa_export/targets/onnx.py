"""Export target ``onnx``: the device half, or the offline model, as one ONNX file for onnxruntime on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from moa_drafter.checkpoint import DeviceDrafter
from moa_drafter.config import DrafterConfig, TokenConfig
from moa_drafter.device_module import DeviceModule, TokenDeviceModule, signature, signature_of
from moa_drafter.drafter import TokenDrafter
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import Specs, TargetOptions, entry_of
from moa_export.targets.onnx_graph import (
    GROUP,
    allow_contrib_operators,
    halve_weights,
    initializer,
    initializer_of_shape,
    integer_product,
    product_by,
    put_matrix,
    put_with_offsets,
    tidy,
    trace,
)
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import TargetEntry
from moa_runtime.drafters.base import Float32

GRAPH_FILE = "device_half.onnx"
WRITER_FILE = "writer.onnx"
#: Candidates for each next token: what it samples from.
TOP_K = 16
#: Weights of embedding and head, independent of the layers': a table of 4 bits costs a quarter of the perplexity.
TABLE = Weights(8, GROUP)
_MOST_BYTES = 2**31  # of a file in the format of Protocol Buffers


class OnnxTarget:
    """See :class:`moa_export.targets.base.ExportTarget`.

    Integer weights become ``MatMulNBits``, whose activations are rounded to int8 in groups of the same size, so
    that products run in integers. 16 bits halve the file; onnxruntime widens the weights when it loads them.
    """

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe = recipe

    def check(self, config: DrafterConfig | TokenConfig) -> None:
        """See :meth:`moa_export.targets.base.ExportTarget.check`."""
        for part in (self._recipe.linear, self._recipe.head):
            if part.is_integer and part.group_size not in (16, 32, 64, 128, 256):
                reason = f"onnx takes group sizes of 16, 32, 64, 128 or 256, not {part.group_size}"
                raise ExportError(reason, code="unsupported_group")
        self._recipe.check_divides(config)
        refuse_too_large(config, self._recipe)

    def export(self, drafter: DeviceDrafter, folder: Path) -> dict[str, TargetEntry]:
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
        return OnnxBackend(folder / entry.file)


def _head_first(matrices: Mapping[str, Float32], outputs: int) -> list[tuple[str, Float32]]:
    """Return the matrices by name, first the head's, which has ``outputs`` columns, then the layers'."""
    return sorted(matrices.items(), key=lambda item: item[1].shape[1] != outputs)


def save(model: onnx.ModelProto, inputs: Specs, outputs: Specs, file: Path) -> dict[str, int]:
    """Write a traced graph; return the versions of its operator sets by their names."""
    tidy(model.graph, inputs, outputs)
    onnx.save(model, file)
    return {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}


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
    """Raise an ExportError if an ONNX file cannot hold the weights, even without their scales."""
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
        reason = (
            f"the drafter takes {size / 1e9:.1f} GB in these widths, and an ONNX file holds 2 GB: choose fewer bits"
        )
        raise ExportError(reason, code="too_large")


class _Table(nn.Module):
    """A token embedding in 8 bits, laid out as ``MatMulNBits`` wants a matrix, so that the head can be the same one.

    Args:
        table: ``[vocab_size, hidden]``.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        codes, scales = round_symmetric(table, TABLE.bits, TABLE.group_size)
        self.register_buffer("codes", (codes.to(torch.int16) + 128).to(torch.uint8).unflatten(1, (-1, GROUP)))
        self.register_buffer("scales", scales.float())

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, hidden]``."""
        return ((self.codes[tokens].float() - 128) * self.scales[tokens][:, :, None]).flatten(1)


def export_writer(model: TokenDrafter, bits: int, folder: Path) -> TargetEntry:
    """Write a whole model, the offline writer, into ``folder``.

    Args:
        bits: of the layers' matrices, 4 or 8. With 4 each group of 32 has a least value and a scale; with 8, a scale.

    Raises:
        ExportError: sizes that groups of 32 do not divide, or more than a file can hold.
    """
    check_writer(model, bits)
    half = TokenDeviceModule(model, top_k=TOP_K, embed=_Table(model.embedding)).eval()
    inputs, outputs = signature_of(half.kv_shape, half.top_k)
    graph, matrices = trace(half, inputs, outputs)
    vocabulary = len(model.head)
    for name, matrix in _head_first(matrices, vocabulary):
        if matrix.shape[1] != vocabulary:
            if bits == 4:
                put_with_offsets(graph, name, matrix)
            else:
                put_matrix(graph, name, matrix, Weights(bits, GROUP))
        elif torch.equal(model.embedding, model.head):
            _share_table(graph, name, matrix.shape)
        else:
            put_matrix(graph, name, matrix, TABLE)
    halve_weights(graph)
    save(graph, inputs, outputs, folder / WRITER_FILE)
    return entry_of(folder / WRITER_FILE, inputs, outputs)


def check_writer(model: TokenDrafter, bits: int) -> None:
    """Raise the ExportErrors of :func:`export_writer`."""
    decoder = model.config.decoder
    sizes = (decoder.hidden_size, decoder.intermediate_size, decoder.num_heads * decoder.head_dim)
    if odd := next((size for size in sizes if size % GROUP), None):
        reason = f"the offline writer is rounded in groups of {GROUP}, which do not divide its width of {odd}"
        raise ExportError(reason, code="unsupported_group")
    size = sum(parameter.numel() for parameter in model.parameters()) * bits / 8 + 2 * model.head.numel()
    if size > _MOST_BYTES:
        raise ExportError(
            f"the offline model takes {size / 1e9:.1f} GB in {bits} bits, and an ONNX file holds 2 GB: choose a "
            "smaller one with --offline-model, or none",
            code="too_large",
        )


def _share_table(model: onnx.ModelProto, head: str, shape: tuple[int, ...]) -> None:
    """Multiply by the embedding's own table in place of the head."""
    graph, (inputs, outputs) = model.graph, shape
    node, place, groups = product_by(graph, head), initializer(graph, head), inputs // GROUP
    table = [initializer_of_shape(graph, outputs, groups, GROUP), initializer_of_shape(graph, outputs, groups)]
    node.CopyFrom(integer_product(node, table, shape, TABLE.bits, GROUP))
    graph.initializer.remove(place)
    allow_contrib_operators(model)
