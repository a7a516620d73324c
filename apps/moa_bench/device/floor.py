"""The floor under a drafting step: the products with stored weights that it cannot do without, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError


@dataclass(frozen=True)
class Product:
    """One matrix product with stored weights.

    Attributes:
        name: of the weights in the graph.
        k, n: sizes of a row before and after; the weights are ``k * n``.
        bits: of one weight.
    """

    name: str
    k: int
    n: int
    bits: int


class Floor(Protocol):
    """The products of one graph, on the engine, with the weights and the settings that the graph runs with."""

    @property
    def products(self) -> Sequence[Product]: ...

    def prepare(self, tokens: int) -> Callable[[], object]:
        """Make random inputs of ``tokens`` rows for every product, as a step has whose tokens are all queries.

        Returns:
            a function that computes every product once.
        """


def floor_of(bundle: Bundle, target: str, *, threads: int) -> Floor:
    """The floor of one of the bundle's targets.

    Raises:
        MoaError: there is none for its engine yet, or its graph has products that the floor does not know.
    """
    if target == "onnx":
        # Imported late, like every engine: the probe measures what importing its own one takes.
        from moa_bench.device.onnx_floor import OnnxFloor

        return OnnxFloor(bundle.graph_path(target), threads=threads)
    raise MoaError(f"there is no floor for {target} yet")
