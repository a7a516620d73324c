"""A worked numeric example of three drafting steps, for ports of the runtime to other languages.

Inputs follow from formulas, so that a port needs no file of them; outputs are what a backend computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moa_runtime.backends.base import Backend, Float32, StepInputs
from moa_runtime.drafters.moa import GrowingRows

PREFIX = (1, 9, 25, 49, 81)
CORRECTION = 64


def memory_rows(count: int, kv_shape: tuple[int, int]) -> tuple[Float32, Float32]:
    """Rows of positions ``0..count-1``, ``[count, kv_heads, head_dim]`` each.

    ``keys[i, h, d] = sin(0.37 i + 0.11 d + h)`` and ``values[i, h, d] = 0.5 cos(0.23 i + 0.07 d + h)``.
    """
    i, h, d = np.meshgrid(*(np.arange(n, dtype=np.float64) for n in (count, *kv_shape)), indexing="ij")
    keys, values = np.sin(0.37 * i + 0.11 * d + h), 0.5 * np.cos(0.23 * i + 0.07 * d + h)
    return keys.astype(np.float32), values.astype(np.float32)


def worked_example(backend: Backend) -> dict[str, Any]:
    """Run three steps and write down what goes in and what comes out.

    1. Catch up: :data:`PREFIX` is committed, rows of all but its last token are there, nothing is cached.
    2. Continue drafting: the token that step 1 proposes, after the cache that step 1 filled.
    3. Roll back: the target chose :data:`CORRECTION` instead; the cache is cut to the prefix, and one more
       row has come.

    ``first_token`` has the candidates after the single token 1 with one memory row of zeros and an empty cache, for the
    samples in a bundle's README.
    """
    cache = GrowingRows(backend.kv_shape)
    first = _step(backend, cache, PREFIX, rows=len(PREFIX) - 1)
    second = _step(backend, cache, (first["outputs"]["top_tokens"][0][0],), rows=len(PREFIX) - 1)
    cache.truncate(len(PREFIX))
    third = _step(backend, cache, (CORRECTION,), rows=len(PREFIX))
    return {"kv_shape": list(backend.kv_shape), "steps": [first, second, third], "first_token": first_token(backend)}


def first_token(backend: Backend) -> dict[str, Any]:
    """Return the candidates after the token 1 alone; see :func:`worked_example`."""
    empty, rows = np.zeros((0, *backend.kv_shape), np.float32), np.zeros((1, *backend.row_shape), np.float32)
    result = backend.step(StepInputs.chain((1,), (empty, empty), (rows, rows)))
    return {"top_tokens": result.top_tokens[0].tolist(), "top_logprobs": _rounded(result.top_logprobs[0])}


def _step(backend: Backend, cache: GrowingRows, tokens: tuple[int, ...], rows: int) -> dict[str, Any]:
    held = cache.length
    inputs = StepInputs.chain(tokens, cache.first(held), memory_rows(rows, backend.row_shape))
    result = backend.step(inputs)
    cache.write(held, result.keys, result.values)
    named = {name: array.astype(int).tolist() for name, array in inputs.by_name().items() if array.dtype != np.float32}
    outputs = {
        "top_tokens": result.top_tokens.tolist(),
        "top_logprobs": _rounded(result.top_logprobs),
        "keys": _digest(result.keys),
        "values": _digest(result.values),
    }
    return {"inputs": {**named, "cached": held, "memory_rows": rows}, "outputs": outputs}


def _rounded(array: Float32) -> Any:
    return np.round(array.astype(np.float64), 4).tolist()


def _digest(array: Float32) -> dict[str, Any]:
    """Return shape, first numbers in row-major order, and sum: enough to find a wrong layout."""
    flat = array.astype(np.float64).ravel()
    return {"shape": list(array.shape), "first": np.round(flat[:4], 4).tolist(), "sum": round(float(flat.sum()), 3)}
