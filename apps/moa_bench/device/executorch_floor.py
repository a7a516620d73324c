"""The floor on ExecuTorch: one program that holds a graph's products with stored weights, each with its own input.

Weights cannot be taken out of a ``.pte`` file. So the products are made again with random weights, of the same sizes
and rounded alike; how long a product takes does not depend on what the weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch import Tensor, nn
from torch.export import Dim

from moa_bench.device.floor import Product
from moa_export.recipe import Weights
from moa_export.targets.executorch_lowering import finish, lower
from moa_export.targets.executorch_weights import round_layer
from moa_runtime.backends.executorch import load_program

_MOST_TOKENS, _TRACED_TOKENS = 64, 3


class ExecutorchFloor:
    """Implements :class:`moa_bench.device.floor.Floor`.

    Args:
        products: from the details of the graph: ``name``, ``k``, ``n``, ``bits`` and ``group_size`` of each.
        threads: processor threads, as for the backend.
    """

    def __init__(self, products: Sequence[Mapping[str, Any]], *, threads: int) -> None:
        self.products = [Product(each["name"], each["k"], each["n"], each["bits"]) for each in products]
        module = _Products(products).eval()
        tokens = {0: Dim("T", min=1, max=_MOST_TOKENS)}
        rows = tuple(torch.zeros(_TRACED_TOKENS, each.k) for each in self.products)
        with torch.no_grad():
            captured = torch.export.export(module, (rows,), dynamic_shapes=((tokens,) * len(rows),), strict=False)
        program = finish(lower({"forward": captured}, XnnpackPartitioner()))
        # Kept beside its method, which does not keep the program's memory alive.
        self._program = load_program(program.buffer, threads=threads)
        self._method = self._program.load_method("forward")

    def prepare(self, tokens: int) -> Callable[[], object]:
        """See :meth:`moa_bench.device.floor.Floor.prepare`; 64 tokens at most."""
        random = torch.Generator().manual_seed(0)
        rows = [torch.randn(tokens, each.k, generator=random) for each in self.products]
        return lambda: self._method.execute(rows)


class _Products(nn.Module):
    def __init__(self, products: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(each["k"], each["n"], bias=False) for each in products)
        for layer, each in zip(self.layers, products, strict=True):
            round_layer(layer, Weights(each["bits"], each["group_size"]), integer_products=True)

    def forward(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer, x in zip(self.layers, rows, strict=True))
