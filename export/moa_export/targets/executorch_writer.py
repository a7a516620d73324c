"""The offline writer as one method ``step`` of an ExecuTorch program, built from the model's description for XNNPACK.

The rules are those of :mod:`moa_export.targets.executorch_program`. Matrices in 4 bits keep their codes and offsets,
their scales are rounded to bfloat16; those in 8 bits, in groups in the description, get one scale a row: XNNPACK has no
groups of 8 bits. It rounds each token's activations to 8 bits, so that sums in another order, or noise of 1e-6, change
what follows: the text is not PyTorch's token by token, and the perplexity says what it is worth.

Sizes: ``T`` new tokens, ``Q`` queries among them, ``S >= 1`` cached entries (for an empty cache one that is masked),
``K`` candidates; ``KV`` key-value heads of ``D`` numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from moa_decoder.matrix import Float32, Matrix
from moa_decoder.spec import Activation, LayerSpec
from moa_decoder.spec import Rotary as RotarySpec
from moa_decoder.weights import DecoderWeights, LayerMatrix, LayerVector
from moa_export.errors import ExportError
from moa_export.quantize import round_symmetric
from moa_export.targets.base import Specs
from moa_export.targets.executorch_program import Norm, Rotary, integer_weight, linear
from moa_runtime.manifest import TensorSpec

#: Tokens of one call, and cached entries, at most.
MOST_WRITER_TOKENS, MOST_CACHED = 256, 2048
#: Cosines and sines of the new tokens' positions, ``[T, 1, D]``, and factors of the queries, ``[T, 1, 1]`` or None.
Positions = tuple[Tensor, Tensor, Tensor | None]


class Writer(nn.Module):
    """A step of a whole model.

    Attributes:
        window: tokens that layers with a window see, for ``self_window`` and ``new_window``; None without such layers.

    Raises:
        ExportError: layers have different windows.
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
        kinds = list(dict.fromkeys((layer.rotary, layer.head_dim) for layer in spec.layers if layer.rotary is not None))
        self.angles = nn.ModuleList(Angles(rotary, size) for rotary, size in kinds if rotary is not None)
        #: Of each layer its angles.
        self.turns = [
            None if layer.rotary is None else kinds.index((layer.rotary, layer.head_dim)) for layer in spec.layers
        ]
        self.layers = nn.ModuleList(Layer(layer, weights, number) for number, layer in enumerate(spec.layers))
        self.norm = WeightedNorm(weights.last_norm(), spec.epsilon)
        self.head = Products((weights.head(), weights.head_bias() if spec.head_bias else None))

    @property
    def signature(self) -> tuple[Specs, Specs]:
        """Inputs and outputs, in order. Masks, of cached and of new tokens, are added to scores: 0 where a token may
        look, -10000 elsewhere."""
        cached, new = [], []
        for name in ("keys", "values"):
            for number, layer in enumerate(self.spec.layers):
                cached.append(TensorSpec(f"self_{name}.{number}", "float32", ("S", layer.kv_heads, layer.head_dim)))
                new.append(TensorSpec(f"{name}.{number}", "float32", ("T", layer.kv_heads, layer.head_dim)))
        masks = ["self_mask", "new_mask", *(["self_window", "new_window"] if self.window else [])]
        numbers = {"tokens": "T", "positions": "T", "queries": "Q"}
        inputs = (
            *(TensorSpec(name, "int64", (size,)) for name, size in numbers.items()),
            *(TensorSpec(name, "float32", ("T", "S" if name.startswith("self") else "T")) for name in masks),
            *cached,
        )
        candidates = "Q", self.top_k
        outputs = TensorSpec("top_tokens", "int64", candidates), TensorSpec("top_logprobs", "float32", candidates)
        return inputs, (*outputs, *new)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """See :attr:`signature`."""
        (tokens, positions, queries), rest = inputs[:3], inputs[3:]
        count = 4 if self.window else 2
        masks, caches = rest[:count], rest[count:]
        # The query heads that share a key are stacked as rows.
        kinds = {(layer.window is None, layer.heads // layer.kv_heads) for layer in self.spec.layers}
        seen = {
            (every, groups): torch.cat([torch.cat(masks[:2] if every else masks[-2:], dim=1)] * groups)
            for every, groups in sorted(kinds)
        }
        turns = [angles(positions) for angles in self.angles]
        x, keys, values, count = self.embedding(tokens), [], [], len(self.layers)
        for number, (layer, spec, at) in enumerate(zip(self.layers, self.spec.layers, self.turns, strict=True)):
            mask = seen[spec.window is None, spec.heads // spec.kv_heads]
            cache = caches[number], caches[count + number]
            x, new_keys, new_values = layer(x, None if at is None else turns[at], mask, *cache)
            keys.append(new_keys)
            values.append(new_values)
        (logits,) = self.head(self.norm(x[queries]))
        if self.spec.logits_scale != 1:
            logits = logits * self.spec.logits_scale
        logits = capped(logits, self.spec.logits_cap)
        top, index = logits.topk(self.top_k, dim=-1)
        # As in moa_export.targets.executorch_program.Draft.
        best = logits.softmax(dim=-1).gather(-1, index[:, :1]).log()
        return index, best + (top - top[:, :1]), *keys, *values


class Layer(nn.Module):
    """A decoder layer, see :class:`moa_decoder.spec.LayerSpec`."""

    def __init__(self, spec: LayerSpec, weights: DecoderWeights, number: int) -> None:
        super().__init__()
        self.spec = spec

        def products(biased: bool, *names: tuple[LayerMatrix, LayerVector]) -> Products:
            return Products(
                *(
                    (weights.matrix(number, name), weights.vector(number, bias) if biased else None)
                    for name, bias in names
                )
            )

        def norm(name: LayerVector, there: bool) -> nn.Module:
            return WeightedNorm(weights.vector(number, name), weights.spec.epsilon) if there else nn.Identity()

        self.qkv = products(spec.qkv_biases, ("q", "q_bias"), ("k", "k_bias"), ("v", "v_bias"))
        self.out = products(spec.out_bias, ("out", "out_bias"))
        self.gate_up = products(spec.mlp_biases, ("gate", "gate_bias"), ("up", "up_bias"))
        self.down = products(spec.mlp_biases, ("down", "down_bias"))
        self.attention_norm = norm("attention_norm", spec.norms_before)
        self.mlp_norm = norm("mlp_norm", spec.norms_before)
        self.after_attention_norm = norm("after_attention_norm", spec.norms_after)
        self.after_mlp_norm = norm("after_mlp_norm", spec.norms_after)
        self.q_norm = norm("q_norm", spec.query_key_norm != "none")
        self.k_norm = norm("k_norm", spec.query_key_norm != "none")
        self.rotary = None if spec.rotary is None else Rotary(spec.head_dim, 2 * len(spec.rotary.frequencies))

    def forward(
        self, x: Tensor, positions: Positions | None, mask: Tensor, old_keys: Tensor, old_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Residual stream ``[T, hidden]`` -> the next one, and keys and values of the new tokens ``[T, KV, D]``."""
        spec = self.spec
        queries, keys, values = self.qkv(self.attention_norm(x))
        queries, keys = self._heads(self.q_norm, queries, spec.heads), self._heads(self.k_norm, keys, spec.kv_heads)
        values = values.view(-1, spec.kv_heads, spec.head_dim)
        if self.rotary is not None and positions is not None:
            *angles, growth = positions
            queries, keys = self.rotary(queries, angles), self.rotary(keys, angles)
            queries = queries if growth is None else queries * growth
        every_key, every_value = torch.cat((old_keys, keys)), torch.cat((old_values, values))
        (mixed,) = self.out(self._attend(queries * spec.attention_scale, every_key, every_value, mask))
        x = x + self._scaled(self.after_attention_norm(mixed))
        gate, up = self.gate_up(self.mlp_norm(x))
        (inner,) = self.down(activated(spec.activation, gate) * up)
        return x + self._scaled(self.after_mlp_norm(inner)), keys, values

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.spec.residual_scale == 1 else x * self.spec.residual_scale

    def _heads(self, norm: nn.Module, rows: Tensor, heads: int) -> Tensor:
        shape = (-1, heads, self.spec.head_dim)
        return norm(rows).view(shape) if self.spec.query_key_norm == "whole" else norm(rows.view(shape))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """``mask``: of the stacked rows. Returns ``[T, heads * D]``."""
        heads, size = self.spec.kv_heads, self.spec.head_dim
        groups = self.spec.heads // heads
        rows = queries.view(-1, heads, groups, size).permute(1, 2, 0, 3).reshape(heads, -1, size)
        scores = capped(torch.bmm(rows, keys.permute(1, 2, 0)), self.spec.attention_cap) + mask
        mixed = torch.bmm(scores.softmax(dim=-1), values.permute(1, 0, 2))
        return mixed.view(heads, groups, -1, size).permute(2, 0, 1, 3).reshape(-1, heads * groups * size)


class Products(nn.Module):
    """Rows times matrices of the same inputs, each with a bias if there is one. Offsets are multiplied by the sums of a
    row's groups."""

    def __init__(self, *each: tuple[Matrix, Float32 | None]) -> None:
        super().__init__()
        self.codes = nn.ModuleList(linear(_stored(matrix), bias) for matrix, bias in each)
        self.offsets = nn.ModuleDict(
            {
                str(at): linear(torch.from_numpy(matrix.offsets))
                for at, (matrix, _) in enumerate(each)
                if matrix.bits == 4 and matrix.offsets is not None
            }
        )
        group, inputs = each[0][0].group, each[0][0].inputs
        self.sums = linear(torch.eye(inputs // group).repeat_interleave(group, dim=1)) if self.offsets else None

    def forward(self, x: Tensor) -> list[Tensor]:
        """``[rows, inputs]`` -> ``[rows, outputs]`` of each."""
        products = [codes(x) for codes in self.codes]
        if self.sums is not None:
            sums = self.sums(x)
            for at, offsets in self.offsets.items():
                products[int(at)] = products[int(at)] + offsets(sums)
        return products


class Table(nn.Module):
    """Rows of a matrix that are taken by number, with a factor."""

    rows: Tensor
    scales: Tensor
    shifts: Tensor

    def __init__(self, matrix: Matrix, factor: float) -> None:
        super().__init__()
        self.plain = matrix.scales is None
        codes = matrix.stored * np.float32(factor) if self.plain else matrix.codes()
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


class WeightedNorm(nn.Module):
    """Root-mean-square norm over the last axis, with weights."""

    weight: Tensor

    def __init__(self, weight: Float32, epsilon: float) -> None:
        super().__init__()
        self.norm = Norm(len(weight), epsilon)
        self.register_buffer("weight", torch.from_numpy(np.array(weight, np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x) * self.weight
        return normed


class Angles(nn.Module):
    """Rotary positions, see :class:`moa_decoder.spec.Rotary`; a head's numbers that are not rotated turn by 0."""

    frequencies: Tensor
    factors: Tensor

    def __init__(self, rotary: RotarySpec, size: int) -> None:
        super().__init__()
        rotated = np.tile(rotary.frequencies, 2)
        rest = size - len(rotated)
        self.register_buffer("frequencies", torch.from_numpy(np.pad(rotated, (0, rest)).astype(np.float32)))
        factors = np.append(np.full(len(rotated), rotary.factor), np.ones(rest))
        self.register_buffer("factors", torch.from_numpy(factors.astype(np.float32)))
        self.growth, self.context = rotary.query_growth, rotary.original_context

    def forward(self, positions: Tensor) -> Positions:
        """int64 ``[T]`` -> :data:`Positions`."""
        at = positions.float().view(-1, 1, 1)
        angles = at * self.frequencies
        growth = 1 + self.growth * torch.log(1 + (at / self.context).floor()) if self.growth else None
        return angles.cos() * self.factors, angles.sin() * self.factors, growth


def activated(kind: Activation, x: Tensor) -> Tensor:
    """Apply an activation to each number."""
    if kind == "silu":
        return x * torch.sigmoid(x)
    return nn.functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def capped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``; ``x`` itself for a cap of 0."""
    return torch.tanh(x / cap) * cap if cap else x


def _stored(matrix: Matrix) -> Tensor:
    """Return the weight of a linear layer that XNNPACK multiplies by; without the offsets of 4 bits."""
    if matrix.scales is None:
        return torch.from_numpy(np.array(matrix.stored))
    if matrix.bits == 4:
        return integer_weight(torch.from_numpy(matrix.codes()), torch.from_numpy(matrix.scales), 4)
    return integer_weight(*round_symmetric(torch.from_numpy(matrix.dense()), 8, 0), 8)
