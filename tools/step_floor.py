"""Compare a drafting step with its floor: the matrix products with stored weights that it contains, and nothing else.

The floor runs on the same engine, in turns with the step. The ratio of the medians tells how much everything else in
the step adds. A context of N means N cached tokens and N memory rows, both random; every new token is a query.

    python tools/step_floor.py --bundle BUNDLE [--target onnx|executorch] [--threads 2] [--contexts 0,128,512]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from moa_bench.benchmark import Table
from moa_bench.device_probe import RandomInputs, backend_of, interleaved
from moa_bench.options import numbers_of
from moa_bench.result import rounded
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.cli_main import run_program
from moa_runtime.errors import MoaError

_WARM_UP = 3
_TOKENS = (1, 8)
_KNOWN = ("MatMulNBits", "MatMul", "Gemm")
_MOST_TOKENS, _TRACED_TOKENS = 64, 3  # of the ExecuTorch program


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
    """The products of one graph, on its engine, with its weights and settings."""

    products: Sequence[Product]

    def prepare(self, tokens: int) -> Callable[[], object]:
        """Make random inputs of ``tokens`` rows for every product; returns a function that computes each once."""


def floor_of(bundle: Bundle, target: str, *, threads: int) -> Floor:
    """Make the floor of one of the bundle's targets.

    Raises:
        MoaError: there is none for its engine, or its graph has products that the floor does not know.
    """
    if target == "onnx":
        return OnnxFloor(bundle.graph_path(target), threads=threads)
    if target == "executorch":
        return ExecutorchFloor(bundle.manifest.targets[target].details["products"], threads=threads)
    raise MoaError(f"there is no floor for {target}", code="no_floor")


class OnnxFloor:
    """One onnxruntime model that holds a graph's products with stored weights, each with its own input.

    Args:
        graph: the ``.onnx`` file of the device half.
        threads: processor threads, as for the backend.

    Raises:
        MoaError: see :func:`floor_model`.
    """

    def __init__(self, graph: Path, *, threads: int) -> None:
        import onnxruntime as ort

        from moa_runtime.backends.onnx import session_options

        self._ort = ort
        model, self.products = floor_model(onnx.load(graph))
        self._session = ort.InferenceSession(
            model.SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"]
        )

    def prepare(self, tokens: int) -> Callable[[], object]:
        """See :meth:`Floor.prepare`."""
        random = np.random.default_rng(0)
        # Bound outputs: inside the step, too, products write into memory that is there already. A binding does not keep
        # numpy's arrays alive, so all memory is onnxruntime's own.
        binding, values = self._session.io_binding(), self._ort.OrtValue
        for tensor, product in zip(self._session.get_inputs(), self.products, strict=True):
            rows = values.ortvalue_from_shape_and_type((tokens, product.k), np.float32)
            rows.update_inplace(random.standard_normal((tokens, product.k), dtype=np.float32))
            binding.bind_ortvalue_input(tensor.name, rows)
        for tensor, product in zip(self._session.get_outputs(), self.products, strict=True):
            rows = values.ortvalue_from_shape_and_type((tokens, product.n), np.float32)
            binding.bind_ortvalue_output(tensor.name, rows)
        return lambda: self._session.run_with_iobinding(binding)


def floor_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Product]]:
    """Take the products of ``model`` whose second factor is stored, in the order of the graph.

    Returns:
        a model with one input and one output for each product, and the products.

    Raises:
        MoaError: a product with stored weights of a kind this function cannot take out of its graph, or none at all.
    """
    weights = _weights(model.graph)
    nodes: list[onnx.NodeProto] = []
    products, inputs, outputs, used = [], [], [], set[str]()
    for node in model.graph.node:
        if not _is_product(node, weights):
            continue
        product = _product(node, weights)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[0], copy.output[0] = f"input_{len(nodes)}", f"output_{len(nodes)}"
        nodes.append(copy)
        products.append(product)
        inputs.append(helper.make_tensor_value_info(copy.input[0], TensorProto.FLOAT, ("T", product.k)))
        outputs.append(helper.make_tensor_value_info(copy.output[0], TensorProto.FLOAT, ("T", product.n)))
        used.update(name for name in node.input[1:] if name)
    if not products:
        raise MoaError(
            "the graph has no matrix product with stored weights, so its step has no floor", code="no_product"
        )
    casts = [node for node in model.graph.node if node.op_type == "Cast" and node.output[0] in used]
    stored = {weights[name].name: weights[name] for name in used}
    graph = helper.make_graph([*casts, *nodes], "floor", inputs, outputs, list(stored.values()))
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version), products


def _weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return stored tensors by the names under which products find them: their own, or that of a widening Cast."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    casts = (node for node in graph.node if node.op_type == "Cast" and node.input[0] in stored)
    return stored | {node.output[0]: stored[node.input[0]] for node in casts}


def _is_product(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node multiplies by stored weights. Raises MoaError if it does so in an unknown way."""
    if not ("MatMul" in node.op_type or "Gemm" in node.op_type) or weights.keys().isdisjoint(node.input):
        return False
    computed = [name for name in node.input if name and name not in weights]
    if node.op_type not in _KNOWN or computed != [node.input[0]]:
        raise MoaError(
            f"the floor cannot hold the product {node.name!r} ({node.op_type}): it knows {', '.join(_KNOWN)} "
            "with one computed input, the first",
            code="no_product",
        )
    return True


def _product(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> Product:
    name = node.input[1]
    attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "MatMulNBits":
        return Product(name, attributes["K"], attributes["N"], attributes["bits"])
    matrix = weights[name]
    k, n = reversed(matrix.dims) if attributes.get("transB") else matrix.dims
    return Product(name, k, n, 8 * helper.tensor_dtype_to_np_dtype(matrix.data_type).itemsize)


class ExecutorchFloor:
    """One ExecuTorch program that holds a graph's products, each with its own input.

    Weights cannot be taken out of a ``.pte`` file, so the products are made again with random weights of these sizes,
    rounded alike; the time of a product does not depend on its weights.

    Args:
        products: from the details of the graph: ``name``, ``k``, ``n``, ``bits`` and ``group_size`` of each.
        threads: processor threads, as for the backend.
    """

    def __init__(self, products: Sequence[Mapping[str, Any]], *, threads: int) -> None:
        import torch
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from torch.export import Dim

        from moa_export.targets.executorch import finish, lower
        from moa_runtime.backends.executorch import load_program

        self.products = [Product(each["name"], each["k"], each["n"], each["bits"]) for each in products]
        tokens = {0: Dim("T", min=1, max=_MOST_TOKENS)}
        rows = tuple(torch.zeros(_TRACED_TOKENS, each.k) for each in self.products)
        shapes = ((tokens,) * len(rows),)
        with torch.no_grad():
            captured = torch.export.export(_module(products), (rows,), dynamic_shapes=shapes, strict=False)
        program = finish(lower({"forward": captured}, XnnpackPartitioner()))
        # Kept beside its method, which does not keep the program's memory alive.
        self._program = load_program(program.buffer, threads=threads)
        self._method = self._program.load_method("forward")

    def prepare(self, tokens: int) -> Callable[[], object]:
        """See :meth:`Floor.prepare`; at most 64 tokens."""
        import torch

        random = torch.Generator().manual_seed(0)
        rows = [torch.randn(tokens, each.k, generator=random) for each in self.products]
        return lambda: self._method.execute(rows)


def _module(products: Sequence[Mapping[str, Any]]) -> Any:
    """Make a torch module of the products: a tuple of rows in, a tuple of rows out."""
    from torch import Tensor, nn

    from moa_export.recipe import Weights
    from moa_export.targets.executorch import round_layer

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(each["k"], each["n"], bias=False) for each in products)
            for layer, each in zip(self.layers, products, strict=True):
                round_layer(layer, Weights(each["bits"], each["group_size"]), integer_products=True)

        def forward(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(layer(x) for layer, x in zip(self.layers, rows, strict=True))

    return Products().eval()


def compare(
    bundle: Bundle, target: str, *, threads: int, contexts: Sequence[int], repeats: int
) -> tuple[Floor, list[dict[str, Any]]]:
    """Time steps and their floor in turns; returns the floor and plain figures (milliseconds).

    Raises:
        MoaError: the target cannot run here, has no floor, or does not hold a context.
    """
    most = bundle.manifest.max_context - max(_TOKENS)
    for context in contexts:
        if not 0 <= context <= most:
            raise MoaError(f"--contexts {context} is out of range: give 0 to {most}", code="out_of_range")
    backend = load_backend(bundle, backend_of(target)[0], threads=threads)
    inputs = RandomInputs(bundle.manifest, max(contexts), backend.kv_shape, backend.row_shape)
    floor, found = floor_of(bundle, target, threads=threads), []
    for context in contexts:
        for tokens in _TOKENS:
            step = inputs.of(context, tokens)
            runs = [lambda step=step: backend.step(step), floor.prepare(tokens)]
            interleaved(runs, _WARM_UP)
            ms, floor_ms = (float(np.median(times)) for times in interleaved(runs, repeats))
            figures = {"ms": rounded(ms), "floor_ms": rounded(floor_ms), "ratio": rounded(ms / floor_ms)}
            found.append({"context": context, "tokens": tokens, **figures})
    return floor, found


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status, see :func:`moa_runtime.cli_main.run_program`."""
    parser = argparse.ArgumentParser(prog="step_floor", description="Compare drafting steps with their bare products.")
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="what moa-export wrote")
    parser.add_argument("--target", default="onnx", help="of the bundle: onnx or executorch (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="processor threads (default %(default)s)")
    parser.add_argument("--contexts", default="0,128,512", metavar="N,N,...", help="(default %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, metavar="N", help="timed calls (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    def work() -> int:
        args = parser.parse_args(argv)
        contexts = numbers_of("--contexts", args.contexts)
        bundle = Bundle.open(args.bundle)
        floor, steps = compare(bundle, args.target, threads=args.threads, contexts=contexts, repeats=args.repeats)
        if args.json:
            print(json.dumps({"products": [asdict(product) for product in floor.products], "steps": steps}))
            return 0
        weights = sum(product.k * product.n for product in floor.products)
        note = f"products in the floor: {len(floor.products)}, with {weights / 1e6:.1f} M weights; medians, ms"
        header = ["context", "tokens", "ms", "floor ms", "ratio"]
        print(Table(header, [list(step.values()) for step in steps], note=note).text())
        return 0

    return run_program("step_floor", work)


if __name__ == "__main__":
    sys.exit(main())
