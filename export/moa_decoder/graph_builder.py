"""Graphs of decoder layers for onnxruntime, built node by node from a description; no tracing, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from moa_decoder.matrix import ZERO, Float32, Matrix, stacked
from moa_decoder.spec import Activation, DecoderSpec, LayerSpec, Rotary
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector, LayerWeights

#: Operators of onnxruntime beside those of ONNX.
CONTRIB = "com.microsoft"
_OPSET, _CONTRIB_VERSION, _IR_VERSION = 21, 1, 10
#: Bytes from which on a constant is not copied into the model of a session.
_LARGE = 1024
#: ``accuracy_level`` of ``MatMulNBits``: it rounds its rows to 8 bits, in the groups of the matrix, and multiplies
#: integers; or it multiplies floats.
_INTEGER_PRODUCTS, _FLOAT_PRODUCTS = 4, 1

#: Type and shape of a graph's input or output; a string is a size that may vary.
Port = tuple[type[np.generic], Sequence[int | str]]


@dataclass(frozen=True)
class Residual:
    """The residual stream between two parts of a layer: the sum of two values, or one alone.

    The sum is left to the next norm, which one operator of onnxruntime computes together with it.
    """

    value: str
    added: str | None = None


@dataclass(frozen=True)
class Positions:
    """Inputs that a graph with rotary positions needs.

    Attributes:
        indices: int64 ``[1, rows]``: for each row its row in the tables.
        cosines, sines: tables, float32 ``[any, rotated numbers / 2]``, see :func:`rotation_tables`.
        growth: float32 ``[rows, 1]``: factors of the queries, for :attr:`moa_decoder.spec.Rotary.query_growth`.
    """

    indices: str
    cosines: str
    sines: str
    growth: str | None = None


def rotation_tables(rotary: Rotary, positions: NDArray[np.int64]) -> tuple[Float32, Float32]:
    """Return cosines and sines of some positions, ``[positions, rotated numbers / 2]``."""
    angles = positions[:, None] * rotary.frequencies
    cosines, sines = np.cos(angles) * rotary.factor, np.sin(angles) * rotary.factor
    return cosines.astype(np.float32), sines.astype(np.float32)


def query_growth(rotary: Rotary, positions: NDArray[np.int64]) -> Float32:
    """Return the factors of the queries at some positions, ``[positions, 1]``."""
    growth = 1 + rotary.query_growth * np.log1p(positions // rotary.original_context)
    return np.asarray(growth, np.float32)[:, None]


def scaled(matrix: Matrix, factor: float) -> Matrix:
    """Return ``factor * matrix``; the numbers that are stored in 4 or 8 bits stay."""
    if factor == 1:
        return matrix
    number = np.float32(factor)
    if matrix.scales is None:
        return replace(matrix, stored=matrix.stored * number)
    offsets = None if matrix.offsets is None else matrix.offsets * number
    return replace(matrix, scales=matrix.scales * number, offsets=offsets)


class GraphBuilder:
    """A graph under construction. Values are named by strings; rows are tokens, ``[rows, size]``.

    Args:
        epsilon: of norms.
        integer_products: whether rows are rounded to 8 bits for products with matrices of 4 and 8 bits.
    """

    def __init__(self, epsilon: float = 0.0, *, integer_products: bool = True) -> None:
        self._epsilon = float(epsilon)  # onnx refuses a whole number
        self._accuracy = _INTEGER_PRODUCTS if integer_products else _FLOAT_PRODUCTS
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, NDArray[Any]] = {}
        self._names: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._block_sums: dict[tuple[str, int], str] = {}
        self._count = 0

    # -- values

    def constant(self, array: NDArray[Any] | np.generic, name: str | None = None) -> str:
        """Add a constant; small equal ones are one, and so are large ones of the same memory."""
        array = np.ascontiguousarray(array)
        content = array.tobytes() if array.nbytes < _LARGE else array.ctypes.data.to_bytes(8, "little")
        key = array.dtype.str, array.shape, content
        if name is None and key in self._names:
            return self._names[key]
        name = name or self._new("constant")
        self._constants[name] = array
        self._names.setdefault(key, name)
        return name

    def integers(self, *numbers: int) -> str:
        """Add a constant int64 vector."""
        return self.constant(np.array(numbers, np.int64))

    def op(self, kind: str, *inputs: str, name: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; return its name. ``""`` stands for an input that is left out."""
        output = name or self._new(kind)
        self._nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def ops(
        self, kind: str, *inputs: str, outputs: int | Sequence[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node whose outputs have these names, or get new ones if a number is given; return the names."""
        names = [self._new(kind) for _ in range(outputs)] if isinstance(outputs, int) else list(outputs)
        self._nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names

    def output(self, name: str, value: str) -> None:
        """Give a value the name of an output of the graph."""
        self.op("Identity", value, name=name)

    def split(self, value: str, *sizes: int) -> list[str]:
        """Cut the last axis."""
        return self.ops("Split", value, self.integers(*sizes), outputs=len(sizes), axis=-1)

    def cast(self, value: str, dtype: type[np.generic]) -> str:
        """Convert numbers."""
        return self.op("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    # -- products

    def product(self, x: str, matrix: Matrix, bias: Float32 | None = None) -> str:
        """``[rows, inputs] -> [rows, outputs]``: with each row of the matrix.

        With 4 and 8 bits the rows are rounded to 8 bits too, unless the builder was told otherwise. Offsets are
        multiplied by the sums of a row's groups.
        """
        if matrix.scales is None:
            inputs = [x, self.constant(matrix.stored)] + ([] if bias is None else [self.constant(bias)])
            return self.op("Gemm", *inputs, transB=1)
        y = self.by_codes(x, matrix)
        if matrix.offsets is not None:
            y = self.op("Gemm", self._sums(x, matrix), self.offsets(matrix), y)
        return y if bias is None else self.op("Add", y, self.constant(bias))

    def by_codes(self, x: str, matrix: Matrix) -> str:
        """The product of a matrix in 4 or 8 bits without its offsets."""
        assert matrix.scales is not None
        return self.op(
            "MatMulNBits",
            *(x, self.constant(matrix.stored), self.constant(matrix.scales)),
            domain=CONTRIB,
            K=matrix.inputs,
            N=matrix.outputs,
            bits=matrix.bits,
            block_size=matrix.group,
            accuracy_level=self._accuracy,
        )

    def offsets(self, matrix: Matrix) -> str:
        """Offsets of a matrix that has some, ``[groups, outputs]``."""
        assert matrix.offsets is not None
        return self.constant(matrix.offsets.T)

    def products(self, x: str, matrices: Sequence[Matrix], biases: Sequence[Float32] | None = None) -> list[str]:
        """Products with several matrices, as one if they have the same bits and groups."""
        if len({(matrix.bits, matrix.group) for matrix in matrices}) != 1:
            each: Sequence[Float32 | None] = biases or [None] * len(matrices)
            return [self.product(x, matrix, bias) for matrix, bias in zip(matrices, each, strict=True)]
        whole = self.product(x, stacked(matrices), None if biases is None else np.concatenate(biases))
        return self.split(whole, *(matrix.outputs for matrix in matrices))

    def _sums(self, x: str, matrix: Matrix) -> str:
        key = x, matrix.group
        if key not in self._block_sums:
            groups = self.op("Reshape", x, self.integers(-1, matrix.inputs // matrix.group, matrix.group))
            self._block_sums[key] = self.op("ReduceSum", groups, self.integers(-1), keepdims=0)
        return self._block_sums[key]

    def rows(self, matrix: Matrix, indices: str) -> str:
        """Rows of a matrix, ``[indices, inputs]``."""
        stored = self.op("Gather", self.constant(matrix.stored), indices)
        if matrix.scales is None:
            return stored
        if matrix.bits == 4:
            low = self.op("BitwiseAnd", stored, self.constant(np.uint8(15)))
            high = self.op("BitShift", stored, self.constant(np.uint8(4)), direction="RIGHT")
            pairs = self.op("Concat", *(self.op("Unsqueeze", half, self.integers(-1)) for half in (low, high)), axis=-1)
            stored = self.op("Reshape", pairs, self.integers(-1, matrix.inputs // matrix.group, matrix.group))
        codes = self.op("Cast", stored, to=onnx.TensorProto.FLOAT)
        return self.scaled_rows(self.op("Sub", codes, self.constant(np.float32(ZERO[matrix.bits]))), matrix, indices)

    def scaled_rows(self, codes: str, matrix: Matrix, indices: str) -> str:
        """Rows from their codes around 0, float32 ``[indices, groups, group]``, scales and offsets."""
        for kind, numbers in (("Mul", matrix.scales), ("Add", matrix.offsets)):
            if numbers is not None:
                each = self.op("Gather", self.constant(numbers), indices)
                codes = self.op(kind, codes, self.op("Unsqueeze", each, self.integers(-1)))
        return self.op("Reshape", codes, self.integers(-1, matrix.inputs))

    # -- parts of layers

    def norm(self, x: str, weight: Float32) -> str:
        """RMS norm over the last axis."""
        name = self.constant(weight)
        return self.op("SimplifiedLayerNormalization", x, name, epsilon=self._epsilon, axis=-1)

    def whole(self, residual: Residual) -> str:
        """Return the residual stream as one value."""
        return residual.value if residual.added is None else self.op("Add", residual.value, residual.added)

    def residual_norm(self, residual: Residual, weight: Float32) -> tuple[str, Residual]:
        """Return the norm of the residual stream, and the stream as one value."""
        if residual.added is None:
            return self.norm(residual.value, weight), residual
        inputs = residual.added, residual.value, self.constant(weight)
        normed, value = self._new("normed"), self._new("residual")
        node = helper.make_node(
            *("SkipSimplifiedLayerNormalization", inputs, [normed, "", "", value]),
            domain=CONTRIB,
            epsilon=self._epsilon,
        )
        self._nodes.append(node)
        return normed, Residual(value)

    def activation(self, kind: Activation, x: str) -> str:
        """Apply an activation to each number."""
        if kind == "silu":
            return self.op("QuickGelu", x, domain=CONTRIB, alpha=1.0)
        return self.op("Gelu", x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def capped(self, x: str, cap: float) -> str:
        """``cap * tanh(x / cap)``; ``x`` itself for a cap of 0."""
        if not cap:
            return x
        factor = self.constant(np.float32(cap))
        return self.op("Mul", self.op("Tanh", self.op("Div", x, factor)), factor)

    def rotary(self, x: str, heads: int, size: int, rotary: Rotary, positions: Positions) -> str:
        """Rotate the heads of ``[rows, heads * size]``."""
        inputs = self.op("Unsqueeze", x, self.integers(0)), positions.indices, positions.cosines, positions.sines
        rotated = 2 * len(rotary.frequencies)
        part: dict[str, Any] = {} if rotated == size else {"rotary_embedding_dim": rotated}
        batch = self.op("RotaryEmbedding", *inputs, domain=CONTRIB, num_heads=heads, **part)
        return self.op("Squeeze", batch, self.integers(0))

    def attention(self, queries: str, spec: LayerSpec, seen: Sequence[tuple[str, str]], mask: str | None = None) -> str:
        """Attend to keys and values that lie in several values.

        Args:
            queries: ``[rows, heads * head_dim]``, multiplied by ``spec.attention_scale`` already.
            seen: keys and values, ``[any, kv_heads, head_dim]`` each.
            mask: boolean ``[rows, all of them]``, true where a row attends; None if every row attends to all.

        Returns:
            ``[rows, heads * head_dim]``.
        """
        heads, groups, width = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
        # Heads of one group become further rows, so keys and values are never repeated.
        grouped = self.op("Reshape", queries, self.integers(-1, heads, groups, width))
        q = self.op("Reshape", self.op("Transpose", grouped, perm=[1, 0, 2, 3]), self.integers(heads, -1, width))
        scores = [self.heads_product(q, keys, transposed=True) for keys, _ in seen]
        whole = scores[0] if len(scores) == 1 else self.op("Concat", *scores, axis=-1)
        if mask is None:
            shares = self.op("Softmax", whole, axis=-1)
        else:
            count = self.op("Shape", mask, start=1)
            by_row = self.op("Reshape", whole, self.op("Concat", self.integers(0, -1, groups), count, axis=0))
            each = self.op("Unsqueeze", mask, self.integers(1))
            kept = self.op("Where", each, by_row, self.constant(np.array(-np.inf, np.float32)))
            shares = self.op("Reshape", self.op("Softmax", kept, axis=-1), self.op("Shape", whole))
        sizes = [self.op("Shape", keys, start=0, end=1) for keys, _ in seen]
        parts = (
            [shares]
            if len(seen) == 1
            else self.ops("Split", shares, self.op("Concat", *sizes, axis=0), outputs=len(seen), axis=-1)
        )
        mixed = [self.heads_product(one, values) for one, (_, values) in zip(parts, seen, strict=True)]
        while len(mixed) > 1:
            mixed[:2] = [self.op("Add", *mixed[:2])]
        rows_first = self.op("Reshape", mixed[0], self.integers(heads, -1, groups, width))
        rows_first = self.op("Transpose", rows_first, perm=[1, 0, 2, 3])
        return self.op("Reshape", rows_first, self.integers(-1, heads * groups * width))

    def heads_product(self, x: str, others: str, *, transposed: bool = False) -> str:
        """Product of ``x [heads, any, n]`` with each head of ``[n, heads, m]``, or of ``[m, heads, n]`` that is
        transposed; it does not move them."""
        return self.op("FusedMatMul", x, others, domain=CONTRIB, transBatchB=1, transB=int(transposed))

    def candidates(self, logits: str, top_k: int) -> tuple[str, str]:
        """Return the columns and log-probabilities (nats), ``[rows, top_k]``, best first, of logits ``[rows,
        tokens]``."""
        top, indices = self.ops("TopK", logits, self.integers(top_k), outputs=2)
        # ReduceLogSumExp takes as long as the product.
        best = self.op("Slice", top, self.integers(0), self.integers(1), self.integers(1))
        total = self.op("ReduceSum", self.op("Exp", self.op("Sub", logits, best)), self.integers(1))
        return indices, self.op("Sub", self.op("Sub", top, best), self.op("Log", total))

    def feed_forward(self, x: str, spec: LayerSpec, weights: LayerWeights, layer: int, factor: float = 1.0) -> str:
        """``factor * down(activation(gate(x)) * up(x))``."""
        names: list[LayerMatrix] = ["gate", "up"]
        biases = _vectors(weights, layer, ["gate_bias", "up_bias"]) if spec.mlp_biases else None
        gate, up = self.products(x, [weights.matrix(layer, name) for name in names], biases)
        inner = self.op("Mul", self.activation(spec.activation, gate), up)
        bias = weights.vector(layer, "down_bias") * np.float32(factor) if spec.mlp_biases else None
        return self.product(inner, scaled(weights.matrix(layer, "down"), factor), bias)

    def before_attention(
        self,
        residual: Residual,
        spec: LayerSpec,
        weights: LayerWeights,
        layer: int,
        positions: Positions | None,
        query_factor: float = 1.0,
    ) -> tuple[str, str, str, Residual]:
        """Norm, queries, keys and values, their norms, rotation.

        Args:
            positions: may be None if the layer has none.
            query_factor: of the queries, such as ``spec.attention_scale`` if attention itself does not multiply by it.

        Returns:
            queries ``[rows, heads * head_dim]``, keys and values ``[rows, kv_heads * head_dim]``, the residual stream.
        """
        normed, residual = self._before(residual, spec, weights, layer, "attention_norm")
        normed_queries = spec.query_key_norm != "none"
        factor = 1.0 if normed_queries else query_factor  # or the norm's weight takes it
        names: list[LayerMatrix] = ["q", "k", "v"]
        q, k, v = (weights.matrix(layer, name) for name in names)
        biases = _vectors(weights, layer, ["q_bias", "k_bias", "v_bias"]) if spec.qkv_biases else None
        if biases is not None:
            biases[0] = biases[0] * np.float32(factor)
        rotary = spec.rotary
        if not normed_queries and rotary is not None and not rotary.query_growth:
            assert positions is not None
            matrices = scaled(q, factor), k, v
            return *self._rotated_at_once(normed, matrices, biases, spec, rotary, positions), residual
        queries, keys, values = self.products(normed, [scaled(q, factor), k, v], biases)
        if normed_queries:
            weight = weights.vector(layer, "q_norm") * np.float32(query_factor)
            queries = self.heads_norm(queries, spec, spec.heads, weight)
            keys = self.heads_norm(keys, spec, spec.kv_heads, weights.vector(layer, "k_norm"))
        if rotary is not None:
            assert positions is not None
            queries = self.rotary(queries, spec.heads, spec.head_dim, rotary, positions)
            keys = self.rotary(keys, spec.kv_heads, spec.head_dim, rotary, positions)
            if rotary.query_growth:
                assert positions.growth is not None
                queries = self.op("Mul", queries, positions.growth)
        return queries, keys, values, residual

    def after_attention(
        self, mixed: str, residual: Residual, spec: LayerSpec, weights: LayerWeights, layer: int
    ) -> Residual:
        """Output product, residual stream, feed-forward.

        Args:
            mixed: what attention gives, ``[rows, heads * head_dim]``.
        """
        factor = 1.0 if spec.norms_after else spec.residual_scale  # or the norm's weight takes it
        bias = weights.vector(layer, "out_bias") * np.float32(factor) if spec.out_bias else None
        out = self.product(mixed, scaled(weights.matrix(layer, "out"), factor), bias)
        residual = self._after(out, residual, spec, weights, layer, "after_attention_norm")
        normed, residual = self._before(residual, spec, weights, layer, "mlp_norm")
        down = self.feed_forward(normed, spec, weights, layer, factor)
        return self._after(down, residual, spec, weights, layer, "after_mlp_norm")

    def head(self, hidden: str, spec: DecoderSpec, weights: DecoderWeights) -> str:
        """Normed hidden states to logits ``[rows, vocab_size]``."""
        bias = weights.head_bias() * np.float32(spec.logits_scale) if spec.head_bias else None
        return self.capped(self.product(hidden, scaled(weights.head(), spec.logits_scale), bias), spec.logits_cap)

    def _before(
        self, residual: Residual, spec: LayerSpec, weights: LayerWeights, layer: int, name: LayerVector
    ) -> tuple[str, Residual]:
        if spec.norms_before:
            return self.residual_norm(residual, weights.vector(layer, name))
        value = self.whole(residual)
        return value, Residual(value)

    def _after(
        self, x: str, residual: Residual, spec: LayerSpec, weights: LayerWeights, layer: int, name: LayerVector
    ) -> Residual:
        if spec.norms_after:
            x = self.norm(x, weights.vector(layer, name) * np.float32(spec.residual_scale))
        return Residual(self.whole(residual), x)

    def _rotated_at_once(
        self,
        x: str,
        matrices: Sequence[Matrix],
        biases: Sequence[Float32] | None,
        spec: LayerSpec,
        rotary: Rotary,
        positions: Positions,
    ) -> tuple[str, str, str]:
        """Queries and keys are rotated by one node."""
        q, k, v = matrices
        if len({(matrix.bits, matrix.group) for matrix in matrices}) == 1:
            whole = self.product(x, stacked(matrices), None if biases is None else np.concatenate(biases))
            both, values = self.split(whole, q.outputs + k.outputs, v.outputs)
        else:
            queries, keys, values = self.products(x, matrices, biases)
            both = self.op("Concat", queries, keys, axis=-1)
        both = self.rotary(both, spec.heads + spec.kv_heads, spec.head_dim, rotary, positions)
        queries, keys = self.split(both, q.outputs, k.outputs)
        return queries, keys, values

    def heads_norm(self, x: str, spec: LayerSpec, heads: int, weight: Float32) -> str:
        """RMS norm of queries or keys ``[rows, heads * head_dim]``, of each head or of all as one vector."""
        if spec.query_key_norm == "whole":
            return self.norm(x, weight)
        normed = self.norm(self.op("Reshape", x, self.integers(-1, heads, spec.head_dim)), weight)
        return self.op("Reshape", normed, self.integers(-1, heads * spec.head_dim))

    # -- the graph

    def model(self, inputs: Mapping[str, Port], outputs: Mapping[str, Port]) -> onnx.ModelProto:
        """Return the graph with its constants. Outputs are values that got their names by ``name`` or
        :meth:`output`."""
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in self._constants.items()]
        return self._model(inputs, outputs, tensors)

    def session(
        self, inputs: Mapping[str, Port], outputs: Mapping[str, Port], options: ort.SessionOptions
    ) -> ort.InferenceSession:
        """Return a session on the processor, without a copy of the constants on the way.

        Args:
            options: gets the constants too, and is for this session alone.
        """
        large = {name: array for name, array in self._constants.items() if array.nbytes >= _LARGE}
        small = {name: array for name, array in self._constants.items() if name not in large}
        tensors = [onnx.numpy_helper.from_array(array, name) for name, array in small.items()]
        for name, array in large.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor = onnx.TensorProto(name=name, data_type=kind, dims=array.shape, data_location="EXTERNAL")
            tensor.external_data.add(key="location", value=name)  # it is given, not read from a file
            tensors.append(tensor)
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in large.values()]
        options.add_external_initializers(list(large), values)
        model = self._model(inputs, outputs, tensors).SerializeToString()
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def _model(
        self, inputs: Mapping[str, Port], outputs: Mapping[str, Port], tensors: Sequence[onnx.TensorProto]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, "decoder", _infos(inputs), _infos(outputs), tensors)
        versions = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, _CONTRIB_VERSION)]
        return helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)

    def _new(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"


def _infos(ports: Mapping[str, Port]) -> list[onnx.ValueInfoProto]:
    kinds = {name: helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for name, (kind, _) in ports.items()}
    return [helper.make_tensor_value_info(name, kinds[name], shape) for name, (_, shape) in ports.items()]


def _vectors(weights: LayerWeights, layer: int, names: Sequence[LayerVector]) -> list[Float32]:
    return [weights.vector(layer, name) for name in names]
