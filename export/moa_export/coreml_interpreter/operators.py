"""What the operators of MIL compute, in numpy.

The meaning of each operator is the one of coremltools' documentation of MIL; only those are here that the
exported programs use. float16 values travel as float32 arrays that hold numbers of float16:
:mod:`program` rounds what an operator of :data:`ARITHMETIC` returns, and may leave alone what
one of :data:`MOVEMENT` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moa_export.errors import ExportError

Array = NDArray[Any]
Operator = Callable[..., Any]


class MilError(ExportError):
    """A program that cannot be evaluated, or inputs that are not its own; the message names the operator or input."""


def matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)


def linear(x: Array, weight: Array, bias: Array) -> Array:
    return x @ weight.T + bias


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def silu(x: Array) -> Array:
    # exp of a large number would overflow; its share is 0 in float16 long before.
    return x / (1 + np.exp(np.minimum(-x, 80)))


def reduce_max(x: Array, axes: Array, keep_dims: bool) -> Array:
    return x.max(axis=tuple(axes), keepdims=keep_dims)


def reduce_mean(x: Array, axes: Array, keep_dims: bool) -> Array:
    return x.mean(axis=tuple(axes), keepdims=keep_dims)


def reduce_log_sum_exp(x: Array, axes: Array, keep_dims: bool) -> Array:
    largest = x.max(axis=tuple(axes), keepdims=True)
    total = largest + np.log(np.exp(x - largest).sum(axis=tuple(axes), keepdims=True))
    return total if keep_dims else total.squeeze(tuple(axes))


def cast(x: Array, dtype: str) -> Array:
    return x.astype(_STORAGE[dtype])


def gather(x: Array, indices: Array, axis: int, batch_dims: int, validate_indices: bool) -> Array:
    """An index that is out of range, which a device answers with anything, is an error whether asked for or not."""
    _supported(batch_dims == 0, "gather with batch dimensions")
    if indices.size and not 0 <= indices.min() <= indices.max() < x.shape[axis]:
        raise MilError(f"gather reads position {indices.min()}..{indices.max()} of an axis of {x.shape[axis]}")
    return x.take(indices, axis=axis)


def concat(values: Sequence[Array], axis: int, interleave: bool) -> Array:
    _supported(not interleave, "concat with interleaving")
    return np.concatenate(values, axis=axis)


def split(x: Array, num_splits: int, axis: int) -> list[Array]:
    return np.split(x, num_splits, axis=axis)


def reshape(x: Array, shape: Array) -> Array:
    _supported(bool((shape > 0).all()), "reshape to a size that depends on the input")
    return x.reshape(tuple(shape))


def transpose(x: Array, perm: Array) -> Array:
    return x.transpose(tuple(perm))


def expand_dims(x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(axes))


def tile(x: Array, reps: Array) -> Array:
    return np.tile(x, tuple(reps))


def topk(
    x: Array, k: int, axis: int, ascending: bool, sort: bool, return_indices: bool, output_indices_dtype: str
) -> tuple[Array, Array]:
    """Of equal numbers the one that comes first wins; a device may choose another."""
    _supported(not ascending and sort and return_indices, "topk other than sorted from the largest with indices")
    # The k-th largest first, so that only the few numbers that reach it have to be sorted.
    rows = np.moveaxis(x, axis, -1)
    least = np.partition(rows, -k, axis=-1)[..., -k]
    indices = np.empty((*rows.shape[:-1], k), _STORAGE[output_indices_dtype])
    for place in np.ndindex(rows.shape[:-1]):
        candidates = np.flatnonzero(rows[place] >= least[place])
        indices[place] = candidates[np.argsort(-rows[place][candidates], kind="stable")[:k]]
    return np.moveaxis(np.take_along_axis(rows, indices, -1), -1, axis), np.moveaxis(indices, -1, axis)


def slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    """``x`` with ``update`` written to ``begin..end`` of each axis; a mask widens that to the axis's own limit."""
    _supported(stride is None or bool((stride == 1).all()), "slice_update with a stride")
    _supported(squeeze_mask is None or not squeeze_mask.any(), "slice_update of single positions")
    first = begin if begin_mask is None else np.where(begin_mask, 0, begin)
    last = end if end_mask is None else np.where(end_mask, x.shape, end)
    if (first < 0).any() or (last > x.shape).any() or tuple(last - first) != update.shape:
        raise MilError(f"slice_update writes {list(update.shape)} to {list(first)}..{list(last)} of {list(x.shape)}")
    written = x.copy()
    target = tuple(map(slice, first, last))
    written[target] = update
    return written


def _supported(condition: bool, what: str) -> None:
    if not condition:
        raise MilError(f"the evaluator has no {what}")


# How values of a type are held.
_STORAGE = {"fp16": np.float32, "fp32": np.float32, "int32": np.int32, "int8": np.int8, "uint8": np.uint8}

#: Operators that compute new numbers.
ARITHMETIC: dict[str, Operator] = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "cast": cast,
    "floor": lambda x: np.floor(x),
    "linear": linear,
    "matmul": matmul,
    "maximum": lambda x, y: np.maximum(x, y),
    "mul": lambda x, y: x * y,
    "real_div": lambda x, y: x / y,
    "reduce_log_sum_exp": reduce_log_sum_exp,
    "reduce_max": reduce_max,
    "reduce_mean": reduce_mean,
    "silu": silu,
    "softmax": softmax,
    "sqrt": lambda x: np.sqrt(x),
    "square": lambda x: x * x,
    "sub": lambda x, y: x - y,
}
#: Operators that only choose or rearrange numbers.
MOVEMENT: dict[str, Operator] = {
    "concat": concat,
    "expand_dims": expand_dims,
    "gather": gather,
    "reshape": reshape,
    "slice_update": slice_update,
    "split": split,
    "tile": tile,
    "topk": topk,
    "transpose": transpose,
}
