"""The device half in PyTorch behind the runtime's backend contract: the reference that exports are checked against."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from moa_drafter.model import MoADrafter
from moa_export.device_half import DeviceHalf
from moa_runtime.backends.base import Float32, Int64, StepResult


class TorchBackend:
    """Implements :class:`moa_runtime.backends.base.Backend` in float32.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    def __init__(self, drafter: MoADrafter, *, top_k: int) -> None:
        self._half = DeviceHalf(drafter, top_k=top_k).eval()
        self._kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    @property
    def top_k(self) -> int:
        return self._half.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.no_grad()
    def step(
        self,
        tokens: Int64,
        positions: Int64,
        queries: Int64,
        self_keys: Float32,
        self_values: Float32,
        self_mask: NDArray[np.bool_],
        memory_keys: Float32,
        memory_values: Float32,
    ) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        arrays = (tokens, positions, queries, self_keys, self_values, self_mask, memory_keys, memory_values)
        return StepResult(*(out.numpy() for out in self._half(*map(torch.from_numpy, arrays))))
