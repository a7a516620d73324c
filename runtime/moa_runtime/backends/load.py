"""Backends by name, an offline writer that loads when it is needed, and one backend for several chats."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError
from moa_runtime.manifest import BundleError, TargetEntry


@dataclass(frozen=True)
class _Entry:
    """Graph of a bundle that a backend runs, and the backend's class."""

    graph: str
    module: str
    attribute: str


#: In the order in which they are tried when none is named.
BACKENDS = {
    "onnx": _Entry("onnx", "moa_runtime.backends.onnx", "OnnxBackend"),
    "executorch": _Entry("executorch", "moa_runtime.backends.executorch", "ExecutorchBackend"),
    "web": _Entry("web", "moa_runtime.backends.onnx", "OnnxBackend"),
    "coreml": _Entry("coreml-stateless", "moa_runtime.backends.coreml", "CoremlBackend"),
}


def load_backend(bundle: Bundle, name: str | None = None, *, threads: int = 2) -> Backend:
    """Load the device half of a bundle.

    Args:
        name: a key of :data:`BACKENDS`; the first whose graph the bundle holds when omitted.
        threads: processor threads for one step, at least 1.

    Raises:
        MoaError: the backend is unknown, lacks packages or its system, or cannot load the bundle's graph.
    """
    if name is None:
        name = next((known for known, entry in BACKENDS.items() if entry.graph in bundle.manifest.targets), "onnx")
    if name not in BACKENDS:
        raise MoaError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}", code="unknown_backend")
    entry, held = BACKENDS[name], bundle.manifest.targets
    if entry.graph not in held:
        fitting = " or ".join(known for known, each in BACKENDS.items() if each.graph in held)
        text = f"the bundle {bundle.folder} has no graph for the backend {name}"
        raise BundleError(f"{text}: choose {fitting or 'a bundle that has one'}", code="unknown_target")
    graph = bundle.graph_path(entry.graph)
    if bundle.manifest.architecture == "eagle3":  # a graph for onnxruntime alone
        return eagle3_backend(graph, threads=threads)
    backend: Backend = getattr(importlib.import_module(entry.module), entry.attribute)(graph, threads=threads)
    return backend


def eagle3_backend(graph: Path, *, threads: int = 2) -> Backend:
    """Load the graph of an EAGLE-3 head for onnxruntime. Raises MoaError if it is none."""
    from moa_runtime.backends.eagle3 import Eagle3Backend
    from moa_runtime.backends.onnx import OnnxEagle3Pass

    return Eagle3Backend(OnnxEagle3Pass(graph, threads=threads))


def load_writer(bundle: Bundle, backend: Backend | None = None, *, threads: int = 2) -> Backend | None:
    """Return the bundle's writer, which loads when it is first needed; None if it has none.

    Args:
        backend: of the device half, if there is one: its engine runs the writer if the bundle has a graph for it,
            else onnxruntime.
        threads: of a step.
    """
    manifest = bundle.manifest
    writer = (manifest.writers.get(backend.writer) if backend is not None else None) or manifest.writer
    if writer is None:
        return None
    most, context = writer.details.get("most"), int(writer.details["max_context"])
    return DeferredBackend(
        lambda: writer_backend(bundle.folder, writer, threads=threads),
        top_k=writer.top_k,
        kv_shape=writer.kv_shape,
        heads_first=most is None and all(tensor.name != "self_keys" for tensor in writer.inputs),
        max_positions=context if most is None else min(context, int(most["S"])),
    )


def writer_backend(folder: Path, writer: TargetEntry, *, threads: int = 2) -> Backend:
    """Load the graph ``writer`` of the bundle in ``folder``. Older ones have one cache for all layers.

    Raises:
        MoaError: its engine cannot load it.
    """
    if "most" in writer.details:
        from moa_runtime.backends.executorch_writer import ExecutorchWriter

        return ExecutorchWriter(folder / writer.file, writer, threads=threads)
    if any(tensor.name == "self_keys" for tensor in writer.inputs):
        from moa_runtime.backends.onnx import OnnxBackend

        return OnnxBackend(folder / writer.file, threads=threads)
    from moa_runtime.backends.onnx_writer import OnnxWriter

    return OnnxWriter(folder / writer.file, threads=threads)


class DeferredBackend(Backend):
    """Load a writer with its first step, in that thread, so that it costs neither time nor memory before an outage."""

    needs_a_row = False

    def __init__(
        self,
        load: Callable[[], Backend],
        *,
        top_k: int,
        kv_shape: tuple[int, int],
        heads_first: bool,
        max_positions: int,
    ) -> None:
        self._load = load
        self._loaded: Backend | None = None
        self.top_k, self.kv_shape, self.heads_first = top_k, kv_shape, heads_first
        self.max_positions = max_positions

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`. Raises MoaError if the writer cannot be loaded."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded.step(inputs)


class SharedBackend(Backend):
    """Run the steps of several threads on one backend, one after the other."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self.top_k, self.kv_shape, self.max_positions = backend.top_k, backend.kv_shape, backend.max_positions
        self.needs_a_row, self.entries_from_rows = backend.needs_a_row, backend.entries_from_rows
        self.heads_first, self.writer = backend.heads_first, backend.writer

    @property
    def row_shape(self) -> tuple[int, int]:
        return self._backend.row_shape

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        with self._lock:
            return self._backend.step(inputs)
