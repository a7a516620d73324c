"""The contract of an export target: recipe and drafter in, files out, and a way to run what was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from moa_drafter.checkpoint import DeviceDrafter
from moa_drafter.config import DrafterConfig, TokenConfig
from moa_export.errors import ExportError
from moa_export.recipe import Recipe
from moa_runtime.backends.base import Backend
from moa_runtime.bundle import TensorSpec


@dataclass(frozen=True)
class Artifact:
    """One graph that an export wrote.

    Attributes:
        name: its key in the manifest, such as ``"onnx"`` or ``"coreml-stateless"``.
        file: a file, or a folder such as an ``.mlpackage``, relative to the bundle.
        inputs, outputs: signature, in order; of the main function where there are several.
        states: tensors that the graph keeps between calls.
        details: what its user should know, in plain values: least system, delegated operators, functions.
    """

    name: str
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NotRun:
    """Why an artifact could not be run on this machine, one sentence."""

    reason: str


@dataclass(frozen=True)
class StandIn:
    """What computes an artifact in place of the engine that it is for, and why that could not, one sentence."""

    backend: Backend
    reason: str


@dataclass(frozen=True)
class TargetOptions:
    """What only some targets heed.

    Attributes:
        context: positions that fixed-size caches hold.
        delegates: of ExecuTorch, by the names in :data:`moa_export.targets.executorch.DELEGATES`.
        npm: whether npm may install onnxruntime-web, by which graphs for browsers are compared.
    """

    context: int = 2048
    delegates: tuple[str, ...] = ("xnnpack",)
    npm: bool = False


class ExportTarget(Protocol):
    """One toolchain. Made for one export."""

    #: Name of the extra that ``pip install "moa-edge[...]"`` needs.
    extra: ClassVar[str]

    def __init__(self, recipe: Recipe, options: TargetOptions) -> None: ...

    def check(self, config: DrafterConfig | TokenConfig) -> None:
        """Refuse at once what this target cannot make.

        Raises:
            ExportError: an architecture, width or group size it does not know, or one that does not divide the
                drafter's sizes.
        """

    def export(self, drafter: DeviceDrafter, folder: Path) -> list[Artifact]:
        """Write the device half of ``drafter`` into ``folder``.

        Args:
            drafter: as :func:`moa_export.quarot.rotate_residual_stream` returns it; left as it is.
        """

    def runner(self, folder: Path, artifact: Artifact) -> Backend | NotRun | StandIn:
        """What runs an artifact read back from disk; it is compared with PyTorch."""


def refuse_without_rows(target: str, config: DrafterConfig | TokenConfig) -> None:
    """Raises ExportError: a drafter that looks at tokens alone, which ``target`` cannot make."""
    if isinstance(config, TokenConfig):
        raise ExportError(
            f"{target} takes drafters of the architecture moa, not {config.architecture}: use --target onnx"
        )


def refuse_copied_layers(target: str, count: int) -> None:
    """Raises ExportError: a drafter with ``count`` layers of its target that the export target cannot hold."""
    if count:
        raise ExportError(f"{target} cannot hold the {count} layers of the target in this drafter: use --target onnx")


def plain_specs(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """A signature in plain values, for an artifact's details."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]
