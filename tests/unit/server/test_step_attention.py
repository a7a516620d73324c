"""Attention of the server's drafters to keys and values in several arrays, some of them empty."""

from __future__ import annotations

import numpy as np
import pytest

from moa_decoder.spec import LayerSpec
from moa_runtime.backends.base import Float32
from moa_server.drafting.step_graphs import StepAttention

HEADS, KV_HEADS, SIZE = 4, 2, 8


@pytest.fixture(scope="module")
def attention() -> StepAttention:
    return StepAttention(LayerSpec(HEADS, KV_HEADS, SIZE, 96, "silu", 1.0, None), 1)


def expected(queries: Float32, keys: Float32, values: Float32, mask: np.ndarray) -> Float32:
    groups = HEADS // KV_HEADS
    q = queries.reshape(-1, KV_HEADS, groups, SIZE)
    scores = np.einsum("rhgd,nhd->rhgn", q, keys)
    scores = np.where(mask[:, None, None], scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("rhgn,nhd->rhgd", shares / shares.sum(-1, keepdims=True), values)
    return mixed.reshape(-1, HEADS * SIZE)


@pytest.mark.parametrize(("rows", "cached", "new"), [(3, 5, 3), (3, 0, 3), (2, 4, 0)])
def test_empty_arrays_are_left_out(attention, rows, cached, new):
    """In onnxruntime before 1.32 a product with one ends the process."""
    rng = np.random.default_rng(rows + 10 * cached + 100 * new)
    queries = rng.standard_normal((rows, HEADS * SIZE)).astype(np.float32)
    keys, values = rng.standard_normal((2, cached + new, KV_HEADS, SIZE)).astype(np.float32)
    mask = rng.random((rows, cached + new)) < 0.7
    mask[:, -1] = True
    seen = [(keys[:cached], values[:cached]), (keys[cached:], values[cached:])]
    mixed = attention(queries, seen, mask)
    np.testing.assert_allclose(mixed, expected(queries, keys, values, mask), atol=1e-5)
    everything = attention(queries, [(keys, values)])
    np.testing.assert_allclose(everything, expected(queries, keys, values, np.ones_like(mask)), atol=1e-5)
