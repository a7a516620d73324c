"""Choosing a backend by name."""

from __future__ import annotations

from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError

BACKENDS = {"onnx": OnnxBackend}


def load_backend(bundle: Bundle, name: str = "onnx", *, threads: int = 2) -> Backend:
    """Load the device half of a bundle.

    Args:
        threads: processor threads for one step, at least 1.

    Raises:
        MoaError: an unknown backend, or one that cannot load the bundle's graph.
    """
    if name not in BACKENDS:
        available = ", ".join(sorted(BACKENDS))
        raise MoaError(
            f"unknown backend {name!r}: available: {available}; coreml and executorch come in a later version"
        )
    return BACKENDS[name](bundle.graph_path(name), threads=threads)
