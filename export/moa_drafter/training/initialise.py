"""Initialise the drafter from the target's weights and states.

From random weights a drafter learns to ignore the memory rows, which are noise at first. So it starts out using them:
the cross-attention looks at the latest visible row, from which it reads the best linear estimate, through the numbers
of one row, of the target's last hidden state, or of the state that enters the target's layers if some follow.

A trained drafter can be continued with more of the target's layers (target layer inference). Then the first of them,
instead of the head, reads the cross-attention's output and expects another space: the learnt attention is kept, and
the two output projections of the cross-attention are fitted again.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moa_drafter.config import ConfigError, DrafterConfig, kv_layers
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.batch import FutureLengths, packed_masks, row_limits
from moa_drafter.training.target_parts import start_layer, start_norm

_EARLIER_LAYERS = 0.15  # weight of every seen layer but the last, which tells most about the next token
_QUERY_SIZE = 3.0  # about the size of a trained query's components
_MEMORY_GAIN = 4.0  # how much louder than self-attention the memory speaks at first
_TARGET_SHARE = 0.1  # of the target's own query and key weights, so that heads differ
_DEPTHS = FutureLengths(1, 6)  # at which the projections are fitted


@torch.no_grad()
def initialise_from_target(
    drafter: MoADrafter, target: Target, samples: Iterable[tuple[Tensor, TargetStates]], *, ridge: float = 1e-2
) -> None:
    """Fill all parameters.

    Self-attention comes from the target's first layer with keys and values, the norm from its final norm, the
    cross-attention's feed-forward input from the layer that it replaces. The output projections of the layer
    self-attention and of the cross-attention's feed-forward network begin at zero; ``Ekv2E`` is the ridge regression
    from the layers' mean to the estimated hidden state.

    Args:
        samples: tokens ``[T]`` and states of some conversations.
        ridge: penalty of every regression, relative to the mean diagonal of its normal equations.
    """
    parts, model = list(samples), target.model
    seen = len(drafter.config.lsa_layers)  # the tail's keys and values come after these
    kv = torch.cat([states.kv[:, :seen] for _, states in parts])
    hidden = torch.cat([estimated(drafter, model, tokens, states) for tokens, states in parts]).double()
    _copy_target_layers(drafter, model)
    _aggregate_linearly(drafter, kv, hidden, ridge)
    own = torch.cat([_self_attended(drafter, tokens) for tokens, _ in parts])
    _read_latest_row(drafter, kv, hidden, own, ridge)


def estimated(drafter: MoADrafter, target: Any, tokens: Tensor, states: TargetStates) -> Tensor:
    """Return the output ``[T, hidden]`` that the cross-attention should have."""
    if not drafter.config.target_layers:
        return states.last
    # Used only here, so no part of the features. The first hidden state is the embedding.
    out = target.model(input_ids=tokens[None].to(target.device), output_hidden_states=True)
    return out.hidden_states[drafter.config.tail_layers[0]][0].to(states.last)


def _copy_target_layers(drafter: MoADrafter, target: Any) -> None:
    layers = target.model.layers
    attending = [layers[index] for index in kv_layers(target.config)]
    replaced = attending[-1 - drafter.config.target_layers]
    for ours, theirs in ((drafter.self_attention, attending[0]), (drafter.cross_attention, replaced)):
        start_layer(ours, theirs)
    if drafter.config.trained_target_layers:
        drafter.start_copies(layers)
    if not isinstance(drafter.norm, nn.Identity):
        start_norm(drafter.norm, target.model)
    drafter.layer_self_attention.self_attn.o_proj.weight.zero_()
    drafter.layer_self_attention.mlp.down_proj.weight.zero_()
    drafter.cross_attention.mlp.down_proj.weight.zero_()


def _aggregate_linearly(drafter: MoADrafter, kv: Tensor, hidden: Tensor, ridge: float) -> None:
    """Set ``layer_scale`` and ``Ekv2E`` so that the aggregate estimates ``hidden``."""
    if drafter.config.layer_scale:
        scale = 1 / (kv.std(dim=0) + 1e-6)
        scale[:-1] *= _EARLIER_LAYERS
        drafter.layer_scale.copy_(scale)
        kv = kv * scale
    fit_linear(drafter.Ekv2E, kv.double().mean(1), hidden, ridge)


def _self_attended(drafter: MoADrafter, tokens: Tensor) -> Tensor:
    """Compute the self-attention's output ``[T, hidden]`` over one conversation."""
    x = drafter.embed(tokens)
    angles = drafter.angles(torch.arange(len(tokens), device=tokens.device))
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()
    return drafter.self_attention(x, *drafter.self_attention.keys_values(x, angles), angles, causal)


def _read_latest_row(drafter: MoADrafter, kv: Tensor, hidden: Tensor, own: Tensor, ridge: float) -> None:
    """Set the cross-attention: queries and keys that prefer recent rows, values that carry the hidden state."""
    attention, dims = drafter.cross_attention.self_attn, drafter.config.decoder
    norm = drafter.cross_attention.input_layernorm
    aggregate = norm(drafter.aggregate(kv)).double()
    query, key = recency_vectors(dims.head_dim, drafter.config.rope_theta)
    # Projections have no bias, so a constant is regressed from the inputs.
    for projection, inputs, constant in ((attention.q_proj, norm(own), query), (attention.k_proj, aggregate, key)):
        ones = torch.ones(len(inputs), 1, dtype=torch.float64)
        functional = regress(inputs.double(), ones, ridge)[:, 0]
        heads = projection.out_features // dims.head_dim
        projection.weight.mul_(_TARGET_SHARE).add_(torch.outer(constant.repeat(heads), functional))

    # Reduced-rank regression: the best estimate through the numbers of one row.
    rank = dims.num_kv_heads * dims.head_dim
    estimate = regress(aggregate, hidden, ridge)
    directions = torch.linalg.svd(aggregate @ estimate, full_matrices=False).Vh[:rank].T  # [hidden, rank]
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[: directions.shape[1]] = (estimate @ directions).T.to(attention.v_proj.weight)
    groups = dims.num_heads // dims.num_kv_heads
    if drafter.config.target_layers:
        # Later layers add to the residual, so the estimate needs its true size.
        weight, gain = directions.new_ones(1), 1 / groups
    else:
        # The norm before the head multiplies by its weight, so the residual must not contain it.
        weight = torch.ones(1) if isinstance(drafter.norm, nn.Identity) else drafter.norm.weight
        gain = _MEMORY_GAIN * own.square().mean().sqrt() / groups
    back = (directions / weight.double()[:, None] * gain).to(attention.o_proj.weight)
    attention.o_proj.weight.zero_()
    per_head = attention.o_proj.weight.unflatten(1, (dims.num_kv_heads, groups, dims.head_dim))
    spread = torch.zeros(back.shape[0], rank).to(back)
    spread[:, : back.shape[1]] = back
    per_head.copy_(spread.unflatten(1, (dims.num_kv_heads, 1, dims.head_dim)).expand_as(per_head))


def recency_vectors(
    head_dim: int, theta: float, *, slope: float = 3.0, reach: int = 10, span: int = 400
) -> tuple[Tensor, Tensor]:
    """Return a query and a key, float64 ``[head_dim]`` before rotation, whose score falls with their distance.

    A constant query and key, rotated by positions at distance d, score ``sum a_i cos(d f_i) + b_i sin(d f_i)`` over the
    rotary frequencies. The coefficients are the least-squares fit to ``-slope * min(d, reach)`` on ``0..span-1``, near
    distances weighing most.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    distance = torch.arange(span, dtype=torch.float64)
    waves = torch.cat((torch.cos(distance[:, None] * frequencies), torch.sin(distance[:, None] * frequencies)), dim=1)
    wanted = -slope * distance.clamp(max=reach)
    weight = 1 / (1 + distance / 8)
    wanted = wanted - (weight * wanted).sum() / weight.sum()  # softmax does not see a constant
    gram = (waves * weight[:, None]).T @ waves + torch.eye(head_dim, dtype=torch.float64)
    coefficients = torch.linalg.solve(gram, (waves * weight[:, None]).T @ wanted)
    query = torch.zeros(head_dim, dtype=torch.float64)
    query[: head_dim // 2] = _QUERY_SIZE
    return query, coefficients * math.sqrt(head_dim) / _QUERY_SIZE


def fit_linear(linear: nn.Linear, x: Tensor, y: Tensor, ridge: float) -> None:
    """Set weight and bias to the ridge regression in float64 from ``x [n, a]`` to ``y [n, b]``."""
    x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), dim=1)
    solution = regress(x.double(), y.double(), ridge)
    linear.weight.copy_(solution[:-1].T)
    linear.bias.copy_(solution[-1])


def regress(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Compute the ridge regression in float64: ``[n, a], [n, b] -> [a, b]``."""
    gram = x.T @ x
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, x.T @ y)


def with_target_layers(drafter: MoADrafter, target_layers: int = 0, *, trained: bool = False) -> MoADrafter:
    """Make an unbound drafter with the weights of ``drafter`` and layers of the target; :func:`start_target_layers`
    must follow.

    Args:
        target_layers: see :class:`~moa_drafter.config.DrafterConfig`; 0 to keep their number.
        trained: whether to train the copies; trained ones stay so, and so does their number.
    """
    was = drafter.config
    config = dataclasses.replace(
        was,
        target_layers=target_layers or was.target_layers,
        trained_target_layers=trained or was.trained_target_layers,
    )
    if was.trained_target_layers and config != was:
        raise ConfigError("the number of trained copies of the target's layers is fixed", code="fixed_by_checkpoint")
    deeper = MoADrafter(config)
    deeper.load_state_dict({**deeper.state_dict(), **drafter.state_dict()})
    return deeper


@torch.no_grad()
def start_target_layers(
    drafter: MoADrafter, was: DrafterConfig, target: Any, samples: Iterable[tuple[Tensor, TargetStates]]
) -> None:
    """Initialise the layers that :func:`with_target_layers` added to a drafter of the configuration ``was``; for the
    other arguments see :func:`fit_to_target_layers`."""
    if drafter.config.trained_target_layers and not was.trained_target_layers:
        drafter.start_copies(target.model.layers)
    if drafter.config.target_layers != was.target_layers:
        fit_to_target_layers(drafter, target, samples)


@torch.no_grad()
def fit_to_target_layers(
    drafter: MoADrafter, target: Any, samples: Iterable[tuple[Tensor, TargetStates]], *, ridge: float = 1e-2
) -> None:
    """Fit the cross-attention's output to the input of the first target layer by two regressions, of the attention's
    output projection and then of the feed-forward network's on the rest. The norm becomes the target's final norm.

    Args:
        drafter: bound to its target.
        target: the transformers model.
        samples, ridge: see :func:`initialise_from_target`.
    """
    parts = [(tokens, states, estimated(drafter, target, tokens, states)) for tokens, states in samples]
    start_norm(drafter.norm, target.model)
    layer = drafter.cross_attention
    layer.mlp.down_proj.weight.zero_()
    # A zero projection adds nothing, so the rest to estimate is the target's state less the input.
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
    """Return the ``input`` of ``projection`` and the ``output`` of the cross-attention, ``[T, ...]``, over one
    conversation."""
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
