"""Which of the runtime's backends runs a graph of a bundle."""

from __future__ import annotations

from moa_runtime.backends.load import BACKENDS
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
