"""The offline writer as an ExecuTorch program, built from the model's description for XNNPACK.

One method ``step``: ``T`` new tokens, ``Q`` queries among them, ``S >= 1`` cached entries (for an empty cache one that
is masked), ``K`` candidates, ``KV`` key-value heads of ``D`` numbers. Matrices in 4 bits keep their codes, scales and
offsets; those in 8 bits, in groups in the description, get one scale a row: XNNPACK has no groups of 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor

from moa_decoder.matrix import GROUP, ZERO, Float32, Matrix
from moa_decoder.spec import Activation, LayerSpec, Rotary
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector
from moa_export.errors import ExportError
from moa_export.graph_files import TOP_K
from moa_export.quantize import round_symmetric
from moa_export.targets.base import Specs, entry_of, traced_inputs
from moa_export.targets.executorch import DELEGATES, finish, lower
from moa_runtime.manifest import TargetEntry, TensorSpec

WRITER_FILE = "writer.pte"
#: Tokens of one call, queries and cached entries at most.
MOST_TOKENS, MOST_QUERIES, MOST_CONTEXT = 256, 16, 2048


def export_executorch_writer(weights: DecoderWeights, folder: Path) -> TargetEntry:
    """Write a program for XNNPACK into ``folder``.

    Raises:
        ExportError: the model has layers with different windows.
    """
    writer = Writer(weights, top_k=TOP_K)
    inputs, outputs = writer.signature
    most = {"T": MOST_TOKENS, "Q": MOST_QUERIES, "S": min(MOST_CONTEXT, weights.spec.max_context)}
    sizes = {name: Dim(name, min=1, max=bound) for name, bound in most.items()}
    dynamic = [{i: sizes[n] for i, n in enumerate(spec.shape) if isinstance(n, str)} for spec in inputs]
    with torch.no_grad():
        shapes = *dynamic[:3], tuple(dynamic[3:])
        captured = torch.export.export(writer.eval(), traced_inputs(inputs), dynamic_shapes=shapes, strict=False)
    lowered = lower({"step": captured}, DELEGATES["xnnpack"].partitioner())
    with (folder / WRITER_FILE).open("wb") as file:
        finish(lowered).write_to_file(file)
    details = {"delegate": "xnnpack", "most": most, "window": writer.window}
    return entry_of(folder / WRITER_FILE, inputs, outputs, details=details)


class Writer(nn.Module):
    """A step of a whole model.

    Attributes:
        window: tokens that layers with a window see, for ``self_window`` and ``new_window``; None without such layers.
    """

    def __init__(self, weights: DecoderWeights, *, top_k: int) -> None:
        super().__init__()
        spec = self.spec = weights.spec
        windows = {layer.window for layer in spec.layers} - {None}
        if len(windows) > 1:
            raise ExportError("executorch writes models of one window of attention only", code="unsupported_writer")
        self.window = next(iter(windows), None)
        self.top_k = min(top_k, spec.vocab_size)
        self.embedding = Table(weights.embedding(), spec.embedding_scale)
        self.layers = nn.ModuleList(Layer(layer, weights, number) for number, layer in enumerate(spec.layers))
        self.norm = RowNorm(weights.last_norm(), spec.epsilon)
        self.head = Product(weights.head(), weights.head_bias() if spec.head_bias else None)

    @property
    def signature(self) -> tuple[Specs, Specs]:
        """Inputs and outputs, in order."""
        cached, new = [], []
        for name in ("keys", "values"):
            for number, layer in enumerate(self.spec.layers):
                cached.append(TensorSpec(f"self_{name}.{number}", "float32", ("S", layer.kv_heads, layer.head_dim)))
                new.append(TensorSpec(f"{name}.{number}", "float32", ("T", layer.kv_heads, layer.head_dim)))
        masks = ["self_mask", "new_mask", *(["self_window", "new_window"] if self.window else [])]
        inputs = (
            *(
                TensorSpec(name, "int64", (size,))
                for name, size in (("tokens", "T"), ("positions", "T"), ("queries", "Q"))
            ),
            *(TensorSpec(name, "float32", ("T", "S" if name.startswith("self") else "T")) for name in masks),
            *cached,
        )
        candidates = "Q", self.top_k
        outputs = TensorSpec("top_tokens", "int64", candidates), TensorSpec("top_logprobs", "float32", candidates)
        return inputs, (*outputs, *new)

    def forward(self, tokens: Tensor, positions: Tensor, queries: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """See :attr:`signature`; masks, of cached and of new tokens, are added to scores: 0 where a token may look,
        -10000 elsewhere."""
        count = 4 if self.window else 2
        parts, caches = rest[:count], rest[count:]
        mask, window = torch.cat(parts[:2], dim=1), torch.cat(parts[-2:], dim=1)
        count = len(self.layers)
        x, keys, values = self.embedding(tokens), [], []
        for layer, old_keys, old_values in zip(self.layers, caches[:count], caches[count:], strict=True):
            seen = mask if layer.spec.window is None else window
            x, new_keys, new_values = layer(x, positions, seen, old_keys, old_values)
            keys.append(new_keys)
            values.append(new_values)
        logits = capped(self.head(self.norm(x[queries])) * self.spec.logits_scale, self.spec.logits_cap)
        top, index = logits.topk(self.top_k, dim=-1)
        best = logits.softmax(dim=-1).gather(-1, index[:, :1]).log()
        return index, best + (top - top[:, :1]), *keys, *values


class Layer(nn.Module):
    """A decoder layer, see :class:`moa_decoder.spec.LayerSpec`."""

    def __init__(self, spec: LayerSpec, weights: DecoderWeights, number: int) -> None:
        super().__init__()
        self.spec, epsilon = spec, weights.spec.epsilon

        def product(name: LayerMatrix, bias: LayerVector, biased: bool) -> Product:
            return Product(weights.matrix(number, name), weights.vector(number, bias) if biased else None)

        def norm(name: LayerVector, there: bool) -> nn.Module:
            return RowNorm(weights.vector(number, name), epsilon) if there else nn.Identity()

        self.q, self.k, self.v = (
            product("q", "q_bias", spec.qkv_biases),
            product("k", "k_bias", spec.qkv_biases),
            product("v", "v_bias", spec.qkv_biases),
        )
        self.out = product("out", "out_bias", spec.out_bias)
        self.gate = product("gate", "gate_bias", spec.mlp_biases)
        self.up = product("up", "up_bias", spec.mlp_biases)
        self.down = product("down", "down_bias", spec.mlp_biases)
        self.attention_norm = norm("attention_norm", spec.norms_before)
        self.mlp_norm = norm("mlp_norm", spec.norms_before)
        self.after_attention_norm = norm("after_attention_norm", spec.norms_after)
        self.after_mlp_norm = norm("after_mlp_norm", spec.norms_after)
        self.q_norm = norm("q_norm", spec.query_key_norm != "none")
        self.k_norm = norm("k_norm", spec.query_key_norm != "none")
        self.turn = None if spec.rotary is None else Turn(spec.rotary, spec.head_dim)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, old_keys: Tensor, old_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Residual stream ``[T, hidden]`` -> the next one, and keys and values of the new tokens ``[T, KV, D]``."""
        spec, scale = self.spec, self.spec.residual_scale
        normed = self.attention_norm(x)
        queries = self._heads(self.q_norm, self.q(normed), spec.heads)
        keys = self._heads(self.k_norm, self.k(normed), spec.kv_heads)
        values = self.v(normed).view(-1, spec.kv_heads, spec.head_dim)
        if self.turn is not None:
            queries, keys = self.turn(queries, positions) * self.turn.growth(positions), self.turn(keys, positions)
        every_key, every_value = torch.cat((old_keys, keys)), torch.cat((old_values, values))
        mixed = self._attend(queries * spec.attention_scale, every_key, every_value, mask)
        x = x + self.after_attention_norm(self.out(mixed)) * scale
        normed = self.mlp_norm(x)
        inner = activated(spec.activation, self.gate(normed)) * self.up(normed)
        return x + self.after_mlp_norm(self.down(inner)) * scale, keys, values

    def _heads(self, norm: nn.Module, rows: Tensor, heads: int) -> Tensor:
        shape = (-1, heads, self.spec.head_dim)
        return norm(rows).view(shape) if self.spec.query_key_norm == "whole" else norm(rows.view(shape))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The query heads that share a key are stacked as rows. Returns ``[T, heads * D]``."""
        heads, size = self.spec.kv_heads, self.spec.head_dim
        groups = self.spec.heads // heads
        rows = queries.view(-1, heads, groups, size).permute(1, 2, 0, 3).reshape(heads, -1, size)
        scores = capped(torch.bmm(rows, keys.permute(1, 2, 0)), self.spec.attention_cap) + torch.cat([mask] * groups)
        mixed = torch.bmm(scores.softmax(dim=-1), values.permute(1, 0, 2))
        return mixed.view(heads, groups, -1, size).permute(2, 0, 1, 3).reshape(-1, heads * groups * size)


class Product(nn.Module):
    """Rows times a :class:`moa_decoder.matrix.Matrix`: ``[rows, inputs] -> [rows, outputs]``."""

    def __init__(self, matrix: Matrix, bias: Float32 | None) -> None:
        super().__init__()
        self.codes = nn.Linear(matrix.inputs, matrix.outputs, bias=bias is not None, device="meta")
        self.codes.weight = nn.Parameter(_stored(matrix), requires_grad=False)
        if bias is not None:
            self.codes.bias = nn.Parameter(torch.from_numpy(np.array(bias)), requires_grad=False)
        self.offsets: nn.Linear | None = None
        if matrix.bits == 4 and matrix.offsets is not None:
            sums = np.kron(np.eye(matrix.inputs // GROUP, dtype=np.float32), np.ones((1, GROUP), np.float32))
            self.sums, self.offsets = _linear(sums), _linear(matrix.offsets)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.codes(x)
        return y if self.offsets is None else y + self.offsets(self.sums(x))


class Table(nn.Module):
    """Rows of a matrix that are taken by number, with a factor."""

    rows: Tensor
    scales: Tensor
    shifts: Tensor

    def __init__(self, matrix: Matrix, factor: float) -> None:
        super().__init__()
        self.plain = matrix.scales is None
        codes = matrix.stored * np.float32(factor) if self.plain else _codes(matrix)
        self.register_buffer("rows", torch.from_numpy(np.ascontiguousarray(codes)))
        if matrix.scales is not None:
            self.group, self.inputs = matrix.group, matrix.inputs
            offsets = np.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
            self.register_buffer("scales", torch.from_numpy(matrix.scales * np.float32(factor)))
            self.register_buffer("shifts", torch.from_numpy(offsets * np.float32(factor)))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[T]`` -> float32 ``[T, inputs]``."""
        if self.plain:
            return self.rows[tokens]
        codes = self.rows[tokens].float().view(-1, self.inputs // self.group, self.group)
        widened = codes * self.scales[tokens].unsqueeze(-1) + self.shifts[tokens].unsqueeze(-1)
        return widened.view(-1, self.inputs)


class RowNorm(nn.Module):
    """Root-mean-square norm over the last axis. The mean is a product: XNNPACK's partitioner refuses means."""

    mean: Tensor
    epsilon: Tensor
    weight: Tensor

    def __init__(self, weight: Float32, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, len(weight)), 1 / len(weight)))
        self.register_buffer("epsilon", torch.tensor([epsilon]))
        self.register_buffer("weight", torch.from_numpy(np.array(weight, np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(nn.functional.linear(x * x, self.mean, self.epsilon)) * self.weight


class Turn(nn.Module):
    """Rotary positions, see :class:`moa_decoder.spec.Rotary`."""

    frequencies: Tensor
    factors: Tensor
    quarter: Tensor

    def __init__(self, rotary: Rotary, size: int) -> None:
        super().__init__()
        half = len(rotary.frequencies)
        rest = size - 2 * half
        angles = np.concatenate((rotary.frequencies, rotary.frequencies, np.zeros(rest))).astype(np.float32)
        factors = np.concatenate((np.full(2 * half, rotary.factor), np.ones(rest))).astype(np.float32)
        turn = np.zeros((size, size), np.float32)  # maps (first, second) to (-second, first)
        turn[np.arange(half), half + np.arange(half)] = -1
        turn[half + np.arange(half), np.arange(half)] = 1
        for name, array in (("frequencies", angles), ("factors", factors), ("quarter", turn)):
            self.register_buffer(name, torch.from_numpy(array))
        self.rotary = rotary

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [T, heads, D]``."""
        angles = positions.float().view(-1, 1, 1) * self.frequencies
        cosines, sines = angles.cos() * self.factors, angles.sin() * self.factors
        return x * cosines + nn.functional.linear(x, self.quarter) * sines

    def growth(self, positions: Tensor) -> Tensor | float:
        """Factors of the queries."""
        if not self.rotary.query_growth:
            return 1.0
        turns = (positions.float() / self.rotary.original_context).floor()
        return (1 + self.rotary.query_growth * torch.log(1 + turns)).view(-1, 1, 1)


def activated(kind: Activation, x: Tensor) -> Tensor:
    """Apply an activation to each number."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    return nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``; ``x`` itself for a cap of 0."""
    return torch.tanh(x / cap) * cap if cap else x


def _codes(matrix: Matrix) -> np.ndarray:
    """Return codes around 0, int8 ``[out, in]``."""
    stored = matrix.stored
    if matrix.bits == 4:
        stored = np.stack((stored & np.uint8(15), stored >> np.uint8(4)), -1)
    return (stored.reshape(matrix.outputs, -1).astype(np.int16) - ZERO[matrix.bits]).astype(np.int8)


def _stored(matrix: Matrix) -> Tensor:
    """Return the weight of a linear layer that XNNPACK multiplies by; without the offsets of 4 bits."""
    if matrix.bits == 32:
        return torch.from_numpy(np.array(matrix.stored))
    if matrix.bits == 4:
        assert matrix.scales is not None
        codes, scales, group, dtype = (
            torch.from_numpy(_codes(matrix)),
            torch.from_numpy(matrix.scales),
            GROUP,
            torch.int4,
        )
    else:
        codes, scales = round_symmetric(torch.from_numpy(matrix.dense()), 8, 0)
        group, dtype = matrix.inputs, torch.int8
    rounded: Tensor = IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=scales.float(),
        zero_point=torch.zeros_like(scales, dtype=torch.int8),
        target_dtype=dtype,
        block_size=(1, group),
        dtype=torch.float32,
        activation_quantization="int8_asym_per_token",
    )
    return rounded


def _linear(weight: Float32) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(torch.from_numpy(np.ascontiguousarray(weight)), requires_grad=False)
    return layer
