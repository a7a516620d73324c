"""Every backend on the tiny drafter, and PyTorch beside it."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest

from moa_drafter.architectures.registry import torch_backend_of
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import BACKENDS, load_backend
from moa_runtime.bundle import Bundle

if TYPE_CHECKING:
    from moa_drafter.model import MoADrafter


@pytest.fixture(scope="session")
def reference(drafter: MoADrafter) -> Backend:

    return torch_backend_of(drafter, top_k=16)


@pytest.fixture(scope="session", params=list(BACKENDS))
def backend(request: pytest.FixtureRequest, every_target: Bundle) -> Backend:
    """Core ML only runs on a Mac: elsewhere its adapter runs on the program of the package, computed with numpy."""
    if request.param == "coreml" and platform.system() != "Darwin":
        from moa_export.recipe import Recipe
        from moa_export.targets.base import TargetOptions
        from moa_export.targets.coreml import CoremlTarget

        entry = every_target.manifest.targets["coreml-stateless"]
        return CoremlTarget(Recipe(), TargetOptions(context=256)).runner(every_target.folder, entry)
    return load_backend(every_target, request.param, threads=1)
