"""Start the drafter from the target instead of from noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moa_drafter.model import MoADrafter


@torch.no_grad()
def initialise_from_target(
    drafter: MoADrafter, target: Any, samples: Iterable[tuple[Tensor, Tensor]], *, ridge: float = 1e-2
) -> None:
    """Self-attention from the target's first layer, cross-attention from its last, the norm from its
    final norm, ``Ekv2E`` by ridge regression from the layers' mean keys and values to the last hidden
    state, and the layer self-attention's output projections at zero, so that it starts as the mean.

    Args:
        target: the transformers model.
        samples: pairs of ``target_kv [T, layers, kv]`` and last hidden states ``[T, hidden]``.
        ridge: penalty, relative to the mean diagonal of the normal equations.
    """
    layers = target.model.layers
    for ours, theirs in ((drafter.self_attention, layers[0]), (drafter.cross_attention, layers[-1])):
        known = ours.state_dict().keys()
        ours.load_state_dict({name: t for name, t in theirs.state_dict().items() if name in known})
    if not isinstance(drafter.norm, nn.Identity):
        drafter.norm.load_state_dict(target.model.norm.state_dict())
    lsa = drafter.layer_self_attention
    lsa.self_attn.o_proj.weight.zero_()
    lsa.mlp.down_proj.weight.zero_()

    width = drafter.config.target_kv_size + 1
    gram = torch.zeros(width, width, dtype=torch.float64)
    moment = torch.zeros(width, drafter.config.decoder.hidden_size, dtype=torch.float64)
    for kv, hidden in samples:
        mean = kv.double().mean(1)
        x = torch.cat((mean, torch.ones(len(mean), 1, dtype=torch.float64)), dim=1)
        gram += x.T @ x
        moment += x.T @ hidden.double()
    gram += ridge * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    solution = torch.linalg.solve(gram, moment)
    drafter.Ekv2E.weight.copy_(solution[:-1].T)
    drafter.Ekv2E.bias.copy_(solution[-1])
