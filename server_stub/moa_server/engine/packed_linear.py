"""Products with a fixed matrix, for few rows and for many, on a CPU with matrices packed by oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moa_drafter.devices import input_major

Product = Callable[[Tensor], Tensor]

#: Rows that oneDNN lays a matrix out for; the layout serves any number.
_EXPECTED_ROWS = 8


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's packed products (private operators that ``torch.compile`` uses too), and
    this processor can compute them in ``dtype``: bfloat16 needs AVX-512 or the like."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_of(dtype: torch.dtype, *layers: nn.Linear) -> Product:
    """The products with several linear layers as one in ``dtype``: ``[n, in] -> [n, sum of out]``."""
    weight = torch.cat([layer.weight.detach().to(dtype) for layer in layers])
    if all(layer.bias is None for layer in layers):
        return product(weight)
    parts = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    return product(weight, torch.cat([part.detach().to(dtype) for part in parts]))


def product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """``[n, in] -> [n, out]`` with ``weight [out, in]``, whose memory is not needed any more afterwards.

    On a CPU with oneDNN (see :func:`moa_server.engine.invariance.is_invariant`), a row's result does not depend on
    the rows beside it from two rows on.
    """
    if weight.device.type != "cpu":
        return lambda rows: functional.linear(rows, weight, bias)
    if not can_pack(weight.dtype):
        laid_out = input_major(weight)
        return lambda rows: functional.linear(rows, laid_out, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _EXPECTED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: multiply(rows, packed, bias, "none", [], "")
