"""The weights of a GGUF file in its own bits: nothing is rounded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_decoder.errors import TargetError
from moa_decoder.families import interleaves, spec_of_gguf
from moa_decoder.gguf_file import Tensor, read_parts
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.spec import DecoderSpec
from moa_decoder.weight_faults import WEIGHTS_DIFFER, Shape, WeightFaults
from moa_decoder.weights import LayerMatrix, LayerVector, shapes_of

_NAMES: dict[LayerMatrix | LayerVector, str] = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "out": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "attention_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "after_attention_norm": "post_attention_norm.weight",
    "after_mlp_norm": "post_ffw_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "out_bias": "attn_output.bias",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
#: Matrices that some files have as one (Phi 3): the name of that, and the parts in order.
_FUSED: dict[str, tuple[str, tuple[LayerMatrix, ...]]] = {
    **dict.fromkeys("qkv", ("attn_qkv.weight", ("q", "k", "v"))),
    **dict.fromkeys(("gate", "up"), ("ffn_up.weight", ("gate", "up"))),
}
#: Factors of rotary positions, which the description holds.
_ROTARY = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_LOW, _HIGH = np.uint16(0x0F), np.uint16(0xF0)


class GgufWeights:
    """The :class:`moa_decoder.weights.DecoderWeights` of a GGUF file.

    Args:
        parts: the file, or all of its parts in order (:func:`moa_decoder.gguf_file.parts_of`).

    Attributes:
        metadata: of the first part.

    Raises:
        TargetError: see :func:`moa_decoder.gguf_file.read_parts`; ``unsupported_target`` for other architectures;
            ``weights_differ`` if tensors are missing, superfluous or of another shape.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        files = read_parts(parts)
        self.name, self.metadata = files[0].path.name, files[0].metadata
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._spec = spec_of_gguf(self.metadata, shapes, self._one_row)
        self._in_pairs = interleaves(self.metadata["general.architecture"])
        self._check()

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        """See :class:`moa_decoder.weights.DecoderWeights`. Raises TargetError: see :func:`matrix_of`."""
        whole, parts = self._place(layer, name)
        matrix = matrix_of(self._tensor(f"blk.{layer}.{whole}"))
        if len(parts) > 1:
            shapes = shapes_of(self._spec.layers[layer], self._spec.hidden_size)
            first = sum(shapes[part][0] for part in parts[: parts.index(name)])
            matrix = matrix.rows(np.arange(first, first + shapes[name][0]))
        order = self._order(layer, name)
        return matrix if order is None else matrix.rows(order)

    def vector(self, layer: int, name: LayerVector) -> Float32:
        vector = self._one_row(f"blk.{layer}.{_NAMES[name]}")
        order = self._order(layer, name[0]) if name in ("q_bias", "k_bias") else None
        return vector if order is None else vector[order]

    def head(self) -> Matrix:
        return matrix_of(self._tensor("output.weight" if "output.weight" in self._tensors else "token_embd.weight"))

    def head_bias(self) -> Float32:
        return self._one_row("output.bias")

    def last_norm(self) -> Float32:
        return self._one_row("output_norm.weight")

    def embedding(self) -> Matrix:
        return matrix_of(self._tensor("token_embd.weight"))

    def embed(self, tokens: Sequence[int]) -> Float32:
        rows = dense_rows(self._tensor("token_embd.weight"), np.asarray(tokens, np.int64))
        return rows if self._spec.embedding_scale == 1 else rows * np.float32(self._spec.embedding_scale)

    def _place(self, layer: int, name: LayerMatrix) -> tuple[str, tuple[LayerMatrix, ...]]:
        """Return the name of the tensor with a matrix, and all that it holds."""
        own = _NAMES[name]
        fused = name == "up" and f"blk.{layer}.{_NAMES['gate']}" not in self._tensors
        if fused or (name in _FUSED and f"blk.{layer}.{own}" not in self._tensors):
            return _FUSED[name]
        return own, (name,)

    def _tensor(self, name: str) -> Tensor:
        if (tensor := self._tensors.get(name)) is None:
            raise TargetError(f"{self.name} lacks the tensor {name}: take another file", code=WEIGHTS_DIFFER)
        return tensor

    def _one_row(self, name: str) -> Float32:
        return dense_rows(self._tensor(name)).reshape(-1)

    def _check(self) -> None:
        """Compare names and shapes of the tensors with the description. Raises TargetError (``weights_differ``)."""
        spec, table = self._spec, (self._spec.vocab_size, self._spec.hidden_size)
        wanted: dict[str, Shape] = {"token_embd.weight": table, "output_norm.weight": (spec.hidden_size,)}
        if "output.weight" in self._tensors:
            wanted["output.weight"] = table
        if spec.head_bias:
            wanted["output.bias"] = (spec.vocab_size,)
        wanted |= {name: self._tensors[name].shape for name in _ROTARY if name in self._tensors}
        for number, layer in enumerate(spec.layers):
            shapes = shapes_of(layer, spec.hidden_size)
            for name in shapes:
                whole, parts = self._place(number, name) if name in _FUSED else (_NAMES[name], (name,))
                wanted[f"blk.{number}.{whole}"] = (sum(shapes[part][0] for part in parts), *shapes[name][1:])
        if faults := WeightFaults.between({name: tensor.shape for name, tensor in self._tensors.items()}, wanted):
            raise TargetError(
                f"the tensors of {self.name} are not those of the model that its metadata describes: {faults}; take "
                "another file, or the model's folder or Hub id",
                code=WEIGHTS_DIFFER,
            )

    def _order(self, layer: int, name: str) -> NDArray[np.int64] | None:
        """Return the file's rows in the order of :class:`moa_decoder.spec.Rotary`, or None if that is their order."""
        if not self._in_pairs or name not in ("q", "k"):
            return None
        spec = self._spec.layers[layer]
        heads = spec.heads if name == "q" else spec.kv_heads
        pairs = np.arange(heads * spec.head_dim).reshape(heads, -1, 2)
        return pairs.transpose(0, 2, 1).reshape(-1)


class _Groups(NamedTuple):
    """Numbers ``codes * scales + minima``, the operations of ggml.

    Attributes:
        codes: int8 ``[rows, groups, numbers of a group]``.
        scales: float32 ``[rows, groups]``.
        minima: as scales; None if all are 0.
    """

    codes: NDArray[np.int8]
    scales: Float32
    minima: Float32 | None


def dense_rows(tensor: Tensor, rows: NDArray[np.int64] | None = None) -> Float32:
    """Return all or some rows of a tensor, float32 ``[n, numbers of a row]``, equal to ggml's to the bit. A vector is
    one row. Raises TargetError: ``unsupported_type``, ``damaged`` if a scale is not finite."""
    blocks = tensor.blocks() if rows is None else tensor.blocks()[rows]
    kind = tensor.type.name
    if kind == "F32":
        return blocks.view("<f4").astype(np.float32)
    if kind == "F16":
        return blocks.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    codes, scales, minima = _groups(tensor, blocks)
    dense = codes.astype(np.float32) * scales[..., None]
    if minima is not None:
        dense += minima[..., None]
    return dense.reshape(len(blocks), -1)


def matrix_of(tensor: Tensor) -> Matrix:
    """Return a tensor as a matrix. ``Matrix.dense`` gives ggml's numbers to the bit, but for offsets in 4 bits if they
    are thousands of times their scale (then to a rounding of float32). Raises TargetError: see :func:`dense_rows`."""
    kind, blocks = tensor.type.name, tensor.blocks()
    if kind in ("F32", "F16", "BF16"):
        return Matrix(32, dense_rows(tensor))
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        stored, (scales, minima) = _nibbles(kind, blocks), _scales(tensor, blocks)
        return Matrix(4, stored, scales, None if minima is None else minima + 8 * scales)
    codes, scales, minima = _groups(tensor, blocks)
    return Matrix(8, codes.view(np.uint8) ^ np.uint8(128), scales, minima)


def _scales(tensor: Tensor, blocks: NDArray[np.uint8]) -> tuple[Float32, Float32 | None]:
    """Return scales and minima, float32 ``[rows, groups]``."""
    kind = tensor.type.name
    each = blocks.reshape(len(blocks), -1, tensor.type.size)
    if kind == "Q6_K":
        halves = _float16(each, 208)
        scales, minima = halves * each[..., 192:208].view(np.int8), None
    elif kind in ("Q4_K", "Q5_K"):
        low, lows, mixed = each[..., 4:8], each[..., 8:12], each[..., 12:16]
        factors = np.concatenate((low & 63, mixed & 15 | low >> 2 & 48), -1)
        offsets = np.concatenate((lows & 63, mixed >> 4 | lows >> 2 & 48), -1)
        scales, minima = _float16(each, 0) * factors, -(_float16(each, 2) * offsets)
    else:
        scales, minima = _float16(each, 0), _float16(each, 2) if kind in ("Q4_1", "Q5_1") else None
    pair = (scales.reshape(len(blocks), -1), None if minima is None else minima.reshape(len(blocks), -1))
    if not all(np.isfinite(half).all() for half in pair if half is not None):
        raise tensor.file.damaged(f"{tensor.name[:60]!r} has scales that are not finite")
    return pair


def _float16(blocks: NDArray[np.uint8], at: int) -> Float32:
    """Return the float16 at a place of each block, float32 ``[rows, blocks, 1]``."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return numbers of 4 bits in the order of :class:`moa_decoder.matrix.Matrix`, uint8 ``[rows, groups, 16]``.

    ggml has the two halves of a block of 32 (Q4_K: two groups of 32) in the low and high halves of its bytes.
    """
    if kind == "Q4_K":
        each = blocks.reshape(len(blocks), -1, 144)[..., 16:].reshape(len(blocks), -1, 32)
    else:
        size = 18 if kind == "Q4_0" else 20
        each = blocks.reshape(len(blocks), -1, size)[..., size - 16 :]
    words = np.ascontiguousarray(each).view("<u2")  # two neighbours of each half
    low, high = words & _LOW | words >> 4 & _HIGH, words >> 4 & _LOW | words >> 8 & _HIGH
    return np.concatenate((low.astype(np.uint8), high.astype(np.uint8)), -1).reshape(len(blocks), -1, 16)


def _groups(tensor: Tensor, blocks: NDArray[np.uint8]) -> _Groups:
    kind, rows = tensor.type.name, len(blocks)
    each = blocks.reshape(rows, -1, tensor.type.size)
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        stored = _nibbles(kind, blocks)
        codes: NDArray[np.int8] = np.stack((stored & 15, stored >> 4), -1).view(np.int8).reshape(rows, -1, 32)
        codes = codes - np.int8(8) if kind == "Q4_0" else codes
    elif kind in ("Q5_0", "Q5_1"):
        start = 6 if kind == "Q5_0" else 8
        fifth = np.unpackbits(each[..., start - 4 : start], axis=-1, bitorder="little")
        codes = (_halves(each[..., start:]) | fifth << 4).view(np.int8)
        codes = codes - np.int8(16) if kind == "Q5_0" else codes
    elif kind == "Q8_0":
        codes = each[..., 2:].view(np.int8)
    elif kind == "Q5_K":
        bits = each[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        fours = _halves(each[..., 48:].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
        codes = (fours | bits.astype(np.uint8) << 4).view(np.int8).reshape(rows, -1, 32)
    elif kind == "Q6_K":
        fours = _halves(each[..., :128].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, 32)
        twos = each[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        codes = ((fours | twos << 4).view(np.int8) - np.int8(32)).reshape(rows, -1, 16)
    else:
        raise TargetError(
            f"{tensor.file.path.name} has tensors of the type {kind}, which this reader does not know: take a file in "
            "Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0 or F16",
            code="unsupported_type",
        )
    return _Groups(codes, *_scales(tensor, blocks))


def _halves(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the low halves of bytes, then the high ones, along the last dimension."""
    return np.concatenate((packed & 15, packed >> 4), -1)
