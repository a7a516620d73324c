"""Going on from a trained drafter with more of the target's layers behind it (target layer inference).

Without such layers the cross-attention's output is what the head reads; with them it is what enters the first of
them. These are different spaces. What the drafter has learnt to look at is kept; the two output projections of the
cross-attention are fitted anew.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moa_drafter.config import ConfigError, DrafterConfig
from moa_drafter.model import MoADrafter
from moa_drafter.target_features import TargetStates
from moa_drafter.training.initialise import estimated, regress
from moa_drafter.training.masks import FutureLengths, packed_masks, row_limits

_DEPTHS = FutureLengths(1, 6)  # at which the projections are fitted


def with_target_layers(drafter: MoADrafter, target_layers: int = 0, *, trained: bool = False) -> MoADrafter:
    """The weights of ``drafter`` in one that contains layers of the target, not bound to it.

    :func:`start_target_layers` must follow.

    Args:
        target_layers: see :class:`~moa_drafter.config.DrafterConfig`; 0 for as many as it has.
        trained: whether its copies are to be trained; those that are stay so.

    Raises:
        ConfigError: there are not so many, the drafter has no final norm or another shape than the target's, or its
            weights were trained with another number of layers that these are tied to.
    """
    was = drafter.config
    config = dataclasses.replace(
        was,
        target_layers=target_layers or was.target_layers,
        trained_target_layers=trained or was.trained_target_layers,
    )
    if was.trained_target_layers and config != was:
        raise ConfigError("this drafter has trained copies of the target's layers: their number cannot be changed")
    deeper = MoADrafter(config)
    deeper.load_state_dict({**deeper.state_dict(), **drafter.state_dict()})
    return deeper


@torch.no_grad()
def start_target_layers(
    drafter: MoADrafter, was: DrafterConfig, target: Any, samples: Iterable[tuple[Tensor, TargetStates]]
) -> None:
    """Let a drafter of :func:`with_target_layers` start well.

    Args:
        drafter: bound to its target.
        was: the configuration that its weights were trained with.
        target, samples: see :func:`fit_to_target_layers`.
    """
    if drafter.config.trained_target_layers and not was.trained_target_layers:
        drafter.start_copies(target.model.layers)
    if drafter.config.target_layers != was.target_layers:
        fit_to_target_layers(drafter, target, samples)


@torch.no_grad()
def fit_to_target_layers(
    drafter: MoADrafter, target: Any, samples: Iterable[tuple[Tensor, TargetStates]], *, ridge: float = 1e-2
) -> None:
    """Let the cross-attention's output be what enters the first target layer, as well as two regressions can.

    The attention's output projection estimates it first, then the feed-forward network's what is left. The norm
    becomes the target's own final norm.

    Args:
        drafter: bound to its target.
        target: the transformers model.
        samples: tokens ``[T]`` and states of some conversations.
        ridge: see :func:`~moa_drafter.training.initialise.initialise_from_target`.
    """
    parts = [(tokens, states, estimated(drafter, target, tokens, states)) for tokens, states in samples]
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    layer = drafter.cross_attention
    layer.mlp.down_proj.weight.zero_()
    # The output of a zero projection adds nothing, so what is left to estimate is the target's state less the input.
    layer.self_attn.o_proj.weight.zero_()
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        inputs, left = [], []
        for tokens, states, wanted in parts:
            read = _run(drafter, projection, tokens, states)
            inputs.append(read["input"])
            left.append(wanted - read["output"])
        solution = regress(torch.cat(inputs).double(), torch.cat(left).double(), ridge)
        projection.weight.copy_(solution.T)


def _run(drafter: MoADrafter, projection: nn.Module, tokens: Tensor, states: TargetStates) -> dict[str, Tensor]:
    """What ``projection`` reads and what the cross-attention computes, ``[T, ...]``, over one conversation."""
    read: dict[str, Tensor] = {}

    def keep(name: str, which: int) -> Callable[..., None]:
        return lambda module, inputs, output: read.update({name: (inputs[0], output)[which]})

    limits = row_limits(0, len(tokens), _DEPTHS, random.Random(0))
    positions, self_mask, memory_mask = packed_masks([len(tokens)], limits)
    hooks = [
        projection.register_forward_hook(keep("input", 0)),
        drafter.cross_attention.register_forward_hook(keep("output", 1)),
    ]
    try:
        drafter(tokens, positions, states.kv, self_mask, memory_mask)
    finally:
        for hook in hooks:
            hook.remove()
    return read
