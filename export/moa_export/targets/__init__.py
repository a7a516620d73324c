"""Export targets: each is one module, loaded only when it is asked for."""

from __future__ import annotations

import importlib

from moa_export.errors import ExportError
from moa_export.targets.base import ExportTarget

#: In the order in which ``--target all`` makes them. Adding a target is a line here and a module.
TARGETS = {
    "onnx": "moa_export.targets.onnx:OnnxTarget",
    "web": "moa_export.targets.web:WebTarget",
    "executorch": "moa_export.targets.executorch:ExecutorchTarget",
    "coreml": "moa_export.targets.coreml:CoremlTarget",
}


def target_of(name: str) -> type[ExportTarget]:
    """The target's class; its module brings the toolchain.

    Raises:
        ExportError: no such target; the message lists those there are.
    """
    if name not in TARGETS:
        raise ExportError(f"unknown --target {name!r}: choose one of {', '.join(TARGETS)}, all")
    module, _, attribute = TARGETS[name].partition(":")
    found: type[ExportTarget] = getattr(importlib.import_module(module), attribute)
    return found
