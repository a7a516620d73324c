"""What runs, watches and bounds each graph of a bundle. Engines are imported late: a probe measures what that takes."""

from __future__ import annotations

from moa_bench.device.floor import Floor
from moa_bench.device.profile import Profile
from moa_runtime.backends.base import StepInputs
from moa_runtime.backends.load import BACKENDS
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError


def backend_of(target: str) -> tuple[str, str]:
    """Name and module of the backend for the bundle's target of that name.

    Raises:
        MoaError: there is none.
    """
    for name, entry in BACKENDS.items():
        if entry.graph == target:
            return name, entry.module
    runs = ", ".join(entry.graph for entry in BACKENDS.values())
    raise MoaError(f"the runtime has no backend for {target!r}; it has some for {runs}")


def floor_of(bundle: Bundle, target: str, *, threads: int) -> Floor:
    """The floor of one of the bundle's targets.

    Raises:
        MoaError: there is none for its engine yet, or its graph has products that the floor does not know.
    """
    if target == "onnx":
        from moa_bench.device.onnx_floor import OnnxFloor

        return OnnxFloor(bundle.graph_path(target), threads=threads)
    if target == "executorch":
        from moa_bench.device.executorch_floor import ExecutorchFloor

        return ExecutorchFloor(bundle.manifest.targets[target].details["products"], threads=threads)
    raise MoaError(f"there is no floor for {target} yet")


def profile_step(bundle: Bundle, target: str, inputs: StepInputs, *, threads: int, repeats: int) -> Profile:
    """Watch ``repeats`` steps of one of the bundle's targets.

    Raises:
        MoaError: nothing here can watch its engine.
    """
    if target == "onnx":
        from moa_bench.device.onnx_profile import profile_onnx

        return profile_onnx(bundle.graph_path(target), inputs, threads=threads, repeats=repeats)
    if target == "executorch":
        from moa_bench.device.executorch_profile import profile_executorch

        return profile_executorch(bundle.graph_path(target), inputs, threads=threads, repeats=repeats)
    raise MoaError(f"there is no profiler for {target} yet")
