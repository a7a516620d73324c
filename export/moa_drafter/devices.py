"""Devices, the floating-point type that a device multiplies fastest, and the memory layout of matrices."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from moa_runtime.errors import MoaError


def check_device(device: str) -> None:
    """Raise a MoaError if torch has no such device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MoaError(f"no torch device {device!r}: {str(error).splitlines()[0]}", code="unknown_device") from error


def fastest_dtype(device: str) -> torch.dtype:
    """Return bfloat16 for accelerators and processors with instructions for it, else float32.

    Measured, because torch cannot be asked: without such instructions bfloat16 is several times slower than float32.
    """
    if device != "cpu":
        return torch.bfloat16
    return min((torch.float32, torch.bfloat16), key=_matmul_seconds)


def _matmul_seconds(dtype: torch.dtype, repeats: int = 5) -> float:
    left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def input_major(matrix: Tensor) -> Tensor:
    """Return the matrix ``[out, in]`` stored input by input; copies unless it is stored so."""
    return matrix.T.contiguous().T


def lay_out_for_few_rows(module: nn.Module) -> None:
    """Store the matrices of all linear layers in ``module`` input by input; no value changes.

    For products of few rows (a draft, a level of a tree) PyTorch's CPU libraries are several times faster with this
    layout than with that of ``nn.Linear``; for hundreds of rows it makes no difference. The last bits of sums may
    change.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = input_major(layer.weight.data)
