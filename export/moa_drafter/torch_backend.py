"""Drafters in PyTorch behind the runtime's backend contract: the reference that exports are compared with."""

from __future__ import annotations

import torch

from moa_drafter.device_module import DeviceModule, TokenDeviceModule
from moa_drafter.drafter import TokenDrafter
from moa_drafter.model import MoADrafter
from moa_runtime.backends.base import Backend, StepInputs, StepResult


class TorchBackend(Backend):
    """A Mixture of Attentions drafter, in float32.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    def __init__(self, drafter: MoADrafter, *, top_k: int) -> None:
        self._module = DeviceModule(drafter, top_k=top_k).eval()
        self._kv_shape = (drafter.config.kv_heads, drafter.config.decoder.head_dim)

    @property
    def top_k(self) -> int:
        return self._module.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        tensors = {name: torch.from_numpy(array) for name, array in inputs.by_name().items()}
        return StepResult(*(out.numpy() for out in self._module(**tensors)))


class TokenTorchBackend(Backend):
    """A drafter that reads tokens alone, in float32. It ignores memory rows.

    Args:
        drafter: bound to its target.
        top_k: candidates per query.
    """

    needs_a_row = False

    def __init__(self, drafter: TokenDrafter, *, top_k: int) -> None:
        self._module = TokenDeviceModule(drafter, top_k=top_k)

    @property
    def top_k(self) -> int:
        return self._module.top_k

    @property
    def kv_shape(self) -> tuple[int, int]:
        return self._module.kv_shape

    @property
    def max_positions(self) -> None:
        return None

    @torch.inference_mode()
    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        given = {name: torch.from_numpy(array) for name, array in inputs.of_tokens().items()}
        return StepResult(*(out.numpy() for out in self._module(**given)))
