"""Random weights of a decoder, in any bits."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moa_decoder.matrix import GROUP, Matrix
from moa_decoder.spec import DecoderSpec


def random_matrix(rng: np.random.Generator, outputs: int, inputs: int, bits: int, *, offsets: bool = False) -> Matrix:
    if bits == 32:
        return Matrix(32, rng.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32))
    groups = outputs, inputs // GROUP
    stored = rng.integers(0, 256, (*groups, GROUP * bits // 8), np.uint8)
    scales = rng.uniform(0.5, 1, groups).astype(np.float32) * np.float32(inputs**-0.5 / 2 ** (bits - 2))
    added = rng.normal(0, 0.2, groups).astype(np.float32) * np.float32(inputs**-0.5) if offsets else None
    return Matrix(bits, stored, scales, added)


@dataclass
class RandomWeights:
    """See :class:`moa_decoder.weights.DecoderWeights`."""

    spec: DecoderSpec
    bits: int = 32
    offsets: bool = False

    def matrix(self, layer: int, name: Any) -> Matrix:
        spec, hidden = self.spec.layers[layer], self.spec.hidden_size
        queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "out": (hidden, queries)}
        shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return random_matrix(_rng(layer, name), *shapes[name], self.bits, offsets=self.offsets)

    def vector(self, layer: int, name: Any) -> Any:
        spec, hidden = self.spec.layers[layer], self.spec.hidden_size
        queries, keys, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
        whole = spec.query_key_norm == "whole"
        sizes = {"q_norm": queries if whole else spec.head_dim, "k_norm": keys if whole else spec.head_dim}
        sizes |= {"q_bias": queries, "k_bias": keys, "v_bias": keys, "gate_bias": inner, "up_bias": inner}
        return _rng(layer, name).uniform(0.5, 1.5, sizes.get(name, hidden)).astype(np.float32)

    def head(self) -> Matrix:
        shape = self.spec.vocab_size, self.spec.hidden_size
        return random_matrix(_rng(-1, "head"), *shape, self.bits, offsets=self.offsets)

    def head_bias(self) -> Any:
        return _rng(-1, "bias").normal(size=self.spec.vocab_size).astype(np.float32)

    def embedding(self) -> Matrix:
        return random_matrix(_rng(-1, "embedding"), self.spec.vocab_size, self.spec.hidden_size, 32)

    def last_norm(self) -> Any:
        return np.ones(self.spec.hidden_size, np.float32)

    def embed(self, tokens: Sequence[int]) -> Any:
        return self.embedding().stored[list(tokens)]


def _rng(layer: int, name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{layer} {name}".encode()))
