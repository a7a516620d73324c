"""The weights of a GGUF file in its own bits: nothing is rounded again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moa_decoder.errors import TargetError
from moa_decoder.families import config_of_gguf, interleaves, norm_offset, spec_of_gguf, tensor_names
from moa_decoder.gguf_blocks import Rows, bits_of, dense_rows, matrix_of
from moa_decoder.gguf_file import read_parts
from moa_decoder.matrix import Float32, Matrix
from moa_decoder.rounding import rounded
from moa_decoder.spec import DecoderSpec
from moa_decoder.tensor_layout import TensorLayout
from moa_decoder.weight_faults import WEIGHTS_DIFFER, Shape, WeightFaults
from moa_decoder.weights import LayerMatrix, LayerVector

#: Tensors by role.
_NAMES = {
    "embedding": "token_embd.weight",
    "last_norm": "output_norm.weight",
    "head": "output.weight",
    "head_bias": "output.bias",
    "q": "blk.{layer}.attn_q.weight",
    "k": "blk.{layer}.attn_k.weight",
    "v": "blk.{layer}.attn_v.weight",
    "out": "blk.{layer}.attn_output.weight",
    "gate": "blk.{layer}.ffn_gate.weight",
    "up": "blk.{layer}.ffn_up.weight",
    "down": "blk.{layer}.ffn_down.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "after_attention_norm": "blk.{layer}.post_attention_norm.weight",
    "after_mlp_norm": "blk.{layer}.post_ffw_norm.weight",
    "q_norm": "blk.{layer}.attn_q_norm.weight",
    "k_norm": "blk.{layer}.attn_k_norm.weight",
    "q_bias": "blk.{layer}.attn_q.bias",
    "k_bias": "blk.{layer}.attn_k.bias",
    "v_bias": "blk.{layer}.attn_v.bias",
    "out_bias": "blk.{layer}.attn_output.bias",
    "gate_bias": "blk.{layer}.ffn_gate.bias",
    "up_bias": "blk.{layer}.ffn_up.bias",
    "down_bias": "blk.{layer}.ffn_down.bias",
}
#: Matrices that some files have as one (Phi 3).
_FUSED_QKV, _FUSED_GATE = "blk.{layer}.attn_qkv.weight", "blk.{layer}.ffn_up.weight"
#: Factors of rotary positions, which the description holds.
_ROTARY = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufWeights:
    """The :class:`moa_decoder.weights.DecoderWeights` of a GGUF file.

    Args:
        parts: the file, or all of its parts in order (:func:`moa_decoder.gguf_file.parts_of`).
        bits: of all matrices: 32 for plain numbers, 8 and 4 rounded (:mod:`moa_decoder.rounding`), but embedding
            and head to 8 at least; None for the file's own.

    Attributes:
        metadata: of the first part.
        scaled: whether a tensor scales the rotary positions, which no config.json can say.

    Raises:
        TargetError: see :func:`moa_decoder.gguf_file.read_parts`; ``unsupported_target`` for other architectures;
            ``weights_differ`` if tensors are missing, superfluous or of another shape.
    """

    def __init__(self, parts: Sequence[Path], bits: Literal[4, 8, 32] | None = None) -> None:
        files = read_parts(parts)
        self.name, self.metadata = files[0].path.name, files[0].metadata
        self._bits = bits
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._spec = spec_of_gguf(self.metadata, self._shapes, self._numbers)
        self._in_pairs = interleaves(self.metadata["general.architecture"])
        self.tied, self.scaled = _NAMES["head"] not in self._tensors, _ROTARY[0] in self._tensors
        names = dict(_NAMES)
        if _FUSED_QKV.format(layer=0) in self._tensors:
            names |= dict.fromkeys("qkv", _FUSED_QKV)
        if names["gate"].format(layer=0) not in self._tensors:
            names["gate"] = _FUSED_GATE
        self._layout = TensorLayout(self._spec, names, tied=self.tied)
        held = {name: shape for name, shape in self._shapes.items() if name not in _ROTARY}
        if faults := WeightFaults.between(held, self._layout.shapes):
            raise TargetError(
                f"the tensors of {self.name} are not those of the model that its metadata describes: {faults}; take "
                "another file, or the model's folder or Hub id",
                code=WEIGHTS_DIFFER,
            )

    @property
    def spec(self) -> DecoderSpec:
        return self._spec

    @property
    def config(self) -> dict[str, Any]:
        """What a config.json says of the model, in the spelling of transformers 4."""
        config = config_of_gguf(self.metadata, self._shapes, self._numbers)
        return {**config, "tie_word_embeddings": self.tied}

    @property
    def bits(self) -> int:
        """Bits of most matrices of the file; files in 4 bits have some in 8."""
        return bits_of(self._tensors[self._layout.place(0, "gate")[0]])

    def matrix(self, layer: int, name: LayerMatrix) -> Matrix:
        """See :class:`moa_decoder.weights.DecoderWeights`. Raises TargetError: see :func:`matrix_of`."""
        tensor, rows = self._place(layer, name)
        return self._matrix(tensor, self._bits, rows)

    def vector(self, layer: int, name: LayerVector) -> Float32:
        return self._dense(layer, name)

    def head(self) -> Matrix:
        return self._table(self._layout.head)

    def head_bias(self) -> Float32:
        return self._numbers(_NAMES["head_bias"])

    def last_norm(self) -> Float32:
        return self._numbers(self._layout.last_norm)

    def embedding(self) -> Matrix:
        return self._table(self._layout.embedding)

    def embed(self, tokens: Sequence[int]) -> Float32:
        rows = dense_rows(self._tensors[self._layout.embedding], np.asarray(tokens, np.int64))
        return rows if self._spec.embedding_scale == 1 else rows * np.float32(self._spec.embedding_scale)

    def checkpoint(self, *, first_rows: bool = False) -> Iterator[tuple[str, Shape, Float32]]:
        """Yield the tensors of a checkpoint with these weights, by name in ascending order: name, shape, and all
        numbers or those of the first row, equal to ggml's to the bit. Raises TargetError: see :func:`dense_rows`."""
        config = self.config
        layout, offset = TensorLayout(self._spec, tensor_names(config), tied=self.tied), norm_offset(config)
        own = {layout.embedding: self._layout.embedding, layout.head: self._layout.head}
        own |= {layout.last_norm: self._layout.last_norm}
        parts, count = layout.parts(), 1 if first_rows else None
        for name, shape in sorted(layout.shapes.items()):
            if name in parts:
                numbers = np.concatenate([self._dense(*part, count) for part in parts[name][:count]])
            else:
                tensor = self._tensors[own.get(name, _NAMES["head_bias"])]
                numbers = dense_rows(tensor, slice(count)).reshape(-1, *shape[1:])[:count]
            yield name, shape, numbers - np.float32(offset) if offset and len(shape) == 1 else numbers

    def _dense(self, layer: int, name: LayerMatrix | LayerVector, count: int | None = None) -> Float32:
        """Return the numbers of a matrix or vector, or its first ``count`` rows."""
        tensor, rows = self._place(layer, name)
        if len(self._shapes[tensor]) == 1:
            return self._numbers(tensor)[rows][:count]
        if count is not None:
            rows = (np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows)[:count]
        return dense_rows(self._tensors[tensor], rows)

    def _matrix(self, tensor: str, bits: int | None, rows: Rows = slice(None)) -> Matrix:
        if bits is None:
            return matrix_of(self._tensors[tensor], rows)
        return rounded(dense_rows(self._tensors[tensor], rows), bits)

    def _table(self, tensor: str) -> Matrix:
        return self._matrix(tensor, None if self._bits is None else max(self._bits, 8))

    def _numbers(self, name: str) -> Float32:
        return dense_rows(self._tensors[name]).reshape(-1)

    def _place(self, layer: int, name: LayerMatrix | LayerVector) -> tuple[str, Rows]:
        """Return the tensor of a matrix or vector, and its rows in the order of :class:`moa_decoder.spec.Rotary`."""
        tensor, rows = self._layout.place(layer, name)
        if not self._in_pairs or name not in ("q", "k", "q_bias", "k_bias"):
            return tensor, rows
        pairs = np.arange(rows.start, rows.stop).reshape(-1, self._spec.layers[layer].head_dim // 2, 2)
        return tensor, pairs.transpose(0, 2, 1).reshape(-1)
