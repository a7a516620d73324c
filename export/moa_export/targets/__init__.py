"""Export targets: each is one module, imported only if an export asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moa_export.errors import ExportError

if TYPE_CHECKING:
    from moa_export.targets.base import ExportTarget

#: Extra and class of each target, in the order in which ``--target all`` makes them. Adding a target is a line here and
#: a module.
TARGETS = {
    "onnx": ("export", "onnx:OnnxTarget"),
    "web": ("export", "web:WebTarget"),
    "executorch": ("executorch", "executorch:ExecutorchTarget"),
    "coreml": ("coreml", "coreml:CoremlTarget"),
}


def extra_of(name: str) -> str:
    """Return the extra with a target's toolchain; raise an ExportError that lists the targets if it is unknown."""
    if name not in TARGETS:
        known = ", ".join(TARGETS)
        raise ExportError(f"unknown --target {name!r}: choose one of {known}, all", code="unknown_target")
    return TARGETS[name][0]


def target_of(name: str) -> type[ExportTarget]:
    """Import a target's class with its toolchain; raise an ExportError that lists the targets if unknown."""
    extra_of(name)
    module, _, attribute = TARGETS[name][1].partition(":")
    found: type[ExportTarget] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found
