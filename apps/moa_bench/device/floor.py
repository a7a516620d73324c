"""The floor under a drafting step: the products with stored weights that it cannot do without, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
