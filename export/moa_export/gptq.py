"""Round weights of few bits by the inputs that they are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.drafter import Drafter
from moa_export.quantize import round_calibrated
from moa_export.recipe import Recipe
from moa_export.recordings import Recording
from moa_export.validation import replay

# From 8 bits on nothing is lost that could be had back.
_MOST_BITS = 4
# A product of one step's few rows costs as much time as one of many.
_STEPS_AT_ONCE = 256
_HEAD = "norm"  # the module whose output the head reads


def needs_calibration(recipe: Recipe) -> bool:
    """Return whether a recipe has matrices of few bits."""
    return recipe.linear.bits <= _MOST_BITS or recipe.head.bits <= _MOST_BITS


@torch.no_grad()
def calibrate(drafter: Drafter, recordings: Sequence[Recording], recipe: Recipe) -> Drafter:
    """Round a drafter's matrices of few bits by the inputs that they have when drafting; return the drafter.

    Args:
        recordings: conversations to draft along; others than those that the export is proved on.
    """
    moments = _second_moments(drafter, recordings)
    head = moments.pop(_HEAD)
    if recipe.head.bits <= _MOST_BITS:
        drafter.head = round_calibrated(drafter.head, recipe.head.bits, recipe.head.group_size, head)
    if recipe.linear.bits <= _MOST_BITS:
        for name, moment in moments.items():
            weight = drafter.get_submodule(name).weight
            weight.copy_(round_calibrated(weight, recipe.linear.bits, recipe.linear.group_size, moment))
    return drafter


def _second_moments(drafter: Drafter, recordings: Sequence[Recording]) -> dict[str, Tensor]:
    """Sums of ``x x^T``, float64, over the inputs of every linear layer of the device half, and over the head's."""
    moments: dict[str, Tensor] = {}
    waiting: dict[str, list[Tensor]] = {}

    def add(name: str, x: Tensor) -> None:
        rows = waiting.setdefault(name, [])
        rows.append(x.reshape(-1, x.shape[-1]).clone())
        if len(rows) == _STEPS_AT_ONCE:
            multiply(name)

    def multiply(name: str) -> None:
        rows = torch.cat(waiting.pop(name)).double()
        moments[name] = moments.get(name, 0) + rows.T @ rows

    handles = [drafter.get_submodule(_HEAD).register_forward_hook(lambda module, inputs, output: add(_HEAD, output))]
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda module, inputs, name=name: add(name, inputs[0])))
    try:
        replay(torch_backend_of(drafter, top_k=1), recordings)
    finally:
        for handle in handles:
            handle.remove()
    for name in list(waiting):
        multiply(name)
    return moments
