"""Export target ``onnx``: the device half, or the offline model, as one ONNX file for onnxruntime on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import onnx
import torch
from onnx import helper
from torch import Tensor, nn

from moa_drafter.checkpoint import DeviceDrafter
from moa_drafter.config import DrafterConfig, TokenConfig
from moa_drafter.device_module import DeviceModule, TokenDeviceModule, signature, signature_of
from moa_drafter.drafter import TokenDrafter
from moa_export.errors import ExportError
from moa_export.quantize import QuantisedEmbedding, round_symmetric
from moa_export.recipe import Recipe, Weights
from moa_export.targets.base import Artifact, TargetOptions
from moa_export.targets.onnx_graph import (
    CONTRIB_DOMAIN,
    GROUP,
    INT8_ACTIVATIONS,
    halve_weights,
    put_matrices,
    put_with_offsets,
    tidy,
    trace,
    with_contrib_operators,
)
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.drafters.base import Float32

GRAPH_FILE = "device_half.onnx"
WRITER_FILE = "writer.onnx"
#: Candidates for each next token: what it samples from.
TOP_K = 16
#: Of embedding and head, whatever the layers have: a table of 4 bits costs a quarter of the perplexity.
TABLE = Weights(8, GROUP)
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
        raise ExportError(
            f"the drafter takes {size / 1e9:.1f} GB in these widths, and an ONNX file holds 2 GB: choose fewer bits"
        )


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


def export_writer(model: TokenDrafter, bits: int, folder: Path) -> Artifact:
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
    (head,) = (name for name, matrix in matrices.items() if matrix.shape[1] == vocabulary)
    layers = {name: matrix for name, matrix in matrices.items() if name != head}
    if torch.equal(model.embedding, model.head):
        _share_table(graph, head, matrices[head].shape)
    else:
        put_matrices(graph, {head: matrices[head]}, TABLE, TABLE, head_size=vocabulary, integer_activations=True)
    if bits == 4:
        for name, matrix in layers.items():
            put_with_offsets(graph, name, matrix)
    else:
        put_matrices(graph, layers, Weights(bits, GROUP), TABLE, head_size=vocabulary, integer_activations=True)
    halve_weights(graph)
    tidy(graph.graph, inputs, outputs)
    onnx.save(graph, folder / WRITER_FILE)
    return Artifact("writer", WRITER_FILE, inputs, outputs)


def check_writer(model: TokenDrafter, bits: int) -> None:
    """Raises ExportError: see :func:`export_writer`."""
    decoder = model.config.decoder
    sizes = (decoder.hidden_size, decoder.intermediate_size, decoder.num_heads * decoder.head_dim)
    if odd := next((size for size in sizes if size % GROUP), None):
        raise ExportError(f"the offline writer is rounded in groups of {GROUP}, which do not divide its width of {odd}")
    size = sum(parameter.numel() for parameter in model.parameters()) * bits / 8 + 2 * model.head.numel()
    if size > _MOST_BYTES:
        raise ExportError(
            f"the offline model takes {size / 1e9:.1f} GB in {bits} bits, and an ONNX file holds 2 GB: choose a "
            "smaller one with --offline-model, or none"
        )


def _share_table(model: onnx.ModelProto, head: str, shape: tuple[int, ...]) -> None:
    """Multiply by the embedding's own table in place of the head."""
    graph = model.graph
    (node,) = (node for node in graph.node if node.op_type == "MatMul" and node.input[1] == head)
    (place,) = (tensor for tensor in graph.initializer if tensor.name == head)
    groups = shape[0] // GROUP
    table = [
        next(tensor.name for tensor in graph.initializer if tuple(tensor.dims) == dims)
        for dims in ((shape[1], groups, GROUP), (shape[1], groups))  # codes, scales
    ]
    product = helper.make_node(
        "MatMulNBits",
        [node.input[0], *table],
        list(node.output),
        name=f"{node.name}_Q8",
        domain=CONTRIB_DOMAIN,
        K=shape[0],
        N=shape[1],
        bits=8,
        block_size=GROUP,
        accuracy_level=INT8_ACTIVATIONS,
    )
    node.CopyFrom(product)
    graph.initializer.remove(place)
    with_contrib_operators(model)
