"""The contract of an export target: it writes a drafter's graphs by a recipe, and runs the files that it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig
from moa_drafter.drafter import Drafter
from moa_export.errors import ExportError
from moa_export.graph_files import size_of
from moa_export.recipe import Recipe
from moa_runtime.backends.base import Backend
from moa_runtime.manifest import TargetEntry, TensorSpec

Specs = tuple[TensorSpec, ...]
#: Sizes to trace a graph with. All differ and none is 0 or 1, which the tracer would take for constants.
_TRACED_SIZES = {"T": 3, "Q": 2, "S": 5, "M": 7, "S+T": 8}


@dataclass(frozen=True)
class NotRun:
    """The reason why a graph could not be run on this machine, in one sentence."""

    reason: str


@dataclass(frozen=True)
class StandIn:
    """The backend that computes a graph in place of its engine, and the reason for that in one sentence."""

    backend: Backend
    reason: str


@dataclass(frozen=True)
class TargetOptions:
    """Options of some targets only.

    Attributes:
        context: positions that fixed-size caches hold.
        delegates: of ExecuTorch, by the names in :data:`moa_export.targets.executorch.DELEGATES`.
        npm: whether npm may install onnxruntime-web, which runs graphs for browsers to compare them with PyTorch.
    """

    context: int = 2048
    delegates: tuple[str, ...] = ("xnnpack",)
    npm: bool = False


class ExportTarget(Protocol):
    """One toolchain. Made for one export.

    Attributes:
        rotates: whether it exports a drafter as :func:`moa_export.quarot.rotate_residual_stream` returns it.
    """

    rotates: bool

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None: ...

    def check(self, config: DrafterConfig | TokenConfig | Eagle3Config) -> None:
        """Refuse at once a drafter that this target cannot export.

        Raises:
            ExportError: an architecture, width or group size that the target does not know, or a group size that does
                not divide the drafter's sizes.
        """

    def export(self, drafter: Drafter, folder: Path) -> dict[str, TargetEntry]:
        """Write the device half of ``drafter`` into ``folder``; return its graphs by their names in the manifest.

        Args:
            drafter: the drafter, rotated if :attr:`rotates`; it is not changed.
        """

    def runner(self, folder: Path, entry: TargetEntry) -> Backend | NotRun | StandIn:
        """Load a graph from disk to compare it with PyTorch."""


@runtime_checkable
class WriterTarget(Protocol):
    """A target that makes a graph of the offline writer, too.

    Attributes:
        writer_answers: number of answers on which the writer is compared with PyTorch; None for all.
    """

    writer_answers: int | None

    def export_writer(self, weights: RoundedWeights, folder: Path) -> TargetEntry:
        """Write a whole model, the offline writer, into ``folder``.

        Raises:
            ExportError: a model that this target does not know.
        """

    def writer_runner(self, folder: Path, entry: TargetEntry) -> Backend | StandIn:
        """Load a writer from disk to compare it with PyTorch."""


def entry_of(
    path: Path, inputs: Specs, outputs: Specs, states: Specs = (), details: Mapping[str, Any] | None = None
) -> TargetEntry:
    """Describe a graph that was just written at ``path`` in the bundle's folder, and is not checked yet."""
    return TargetEntry(path.name, size_of(path), inputs, outputs, states, details or {})


def traced_inputs(specs: Iterable[TensorSpec]) -> tuple[Tensor, ...]:
    """Return tensors to trace a graph of these inputs with."""
    shapes = [(spec.dtype, [_TRACED_SIZES[n] if isinstance(n, str) else n for n in spec.shape]) for spec in specs]
    return tuple(
        torch.arange(shape[0]) if dtype == "int64" else torch.ones(shape, dtype=getattr(torch, dtype))
        for dtype, shape in shapes
    )


def check_drafter(target: str, config: DrafterConfig | TokenConfig | Eagle3Config, *, layers: bool) -> None:
    """Refuse a drafter that ``target`` cannot export.

    Args:
        layers: whether a drafter may have layers of its target.

    Raises:
        ExportError: the drafter is no Mixture of Attentions, or has such layers.
    """
    if not isinstance(config, DrafterConfig):
        reason = f"{target} takes drafters of the architecture moa, not {config.architecture}: use --target onnx"
        raise ExportError(reason, code="unsupported_drafter")
    if config.target_layers and not layers:
        reason = f"{target} cannot hold the {config.target_layers} layers of the target in this drafter"
        raise ExportError(f"{reason}: use --target onnx", code="unsupported_drafter")


def plain_signature(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Return a signature in plain values, for a graph's details."""
    sides = {"inputs": inputs, "outputs": outputs}
    return {
        side: [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]
        for side, specs in sides.items()
    }
