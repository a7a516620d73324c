"""Export target ``onnx``: the device half as one ONNX file for onnxruntime on a CPU."""

from __future__ import annotations

from pathlib import Path

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig
from moa_drafter.drafter import Drafter
from moa_export.errors import ExportError
from moa_export.gptq import needs_calibration
from moa_export.graph_files import refuse_too_large, write_half, write_writer
from moa_export.module_parts import parts_of
from moa_export.recipe import Recipe
from moa_export.targets.base import TargetOptions
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import eagle3_backend, writer_backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.manifest import TargetEntry


class OnnxTarget:
    """See :class:`moa_export.targets.base.ExportTarget` and :class:`moa_export.targets.base.WriterTarget`.

    Integer weights become ``MatMulNBits``, whose activations are rounded to int8 in groups of the same size, so
    that products run in integers. 16 bits halve the file; onnxruntime widens the weights when it loads them.
    """

    writer_answers = None

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None:
        self._recipe = recipe
        self.rotates = needs_calibration(recipe)  # eight bits lose nothing that a rotation could save

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
        return {"onnx": write_half(parts_of(drafter), self._recipe, folder)}

    def runner(self, folder: Path, entry: TargetEntry) -> Backend:
        """Load the graph into onnxruntime on the CPU."""
        if any(spec.name == "features" for spec in entry.inputs):
            return eagle3_backend(folder / entry.file)
        return OnnxBackend(folder / entry.file)

    def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
        """See :meth:`moa_export.targets.base.WriterTarget.export_writer`."""
        return write_writer(weights, folder)

    def writer_runner(self, folder: Path, entry: TargetEntry) -> Backend:
        """Load a writer into onnxruntime on the CPU."""
        return writer_backend(folder, entry)
