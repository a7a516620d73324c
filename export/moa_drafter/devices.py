"""What a machine computes with: its devices, and the floating-point type that it multiplies fastest."""

from __future__ import annotations

import time

import torch

from moa_runtime.errors import MoaError


def check_device(device: str) -> None:
    """Raise a MoaError where torch has no such device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MoaError(f"no torch device {device!r}: {str(error).splitlines()[0]}") from error


def fastest_dtype(device: str) -> torch.dtype:
    """bfloat16 on accelerators and on processors with instructions for it, else float32.

    Measured, because it cannot be asked for: without such instructions bfloat16 is several times
    slower than float32, with them several times faster.
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
