"""What turns gradients into steps: AdamW, or Muon for the matrices and AdamW for what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moa_drafter.training.settings import TrainSettings
from moa_drafter.training.shared_muon import SharedMuon

_BETAS = (0.9, 0.95)


class Optimizers:
    """Several of torch's optimisers that step as one, at one learning rate.

    Attributes:
        parts: what each holds is disjoint, together they hold every trained parameter.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    def step(self, rate: float) -> None:
        """One step along the gradients, at learning rate ``rate``."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """What :meth:`load_state_dict` needs to go on exactly."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def _adamw(drafter: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    return [_adamw_over([p for p in drafter.parameters() if p.requires_grad], settings)]


def _muon(drafter: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the weights of linear layers.

    Its steps are scaled to the size of AdamW's (arXiv 2502.16982, section 2.2), so that one rate serves both.
    """
    linear = [m.weight for m in drafter.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    taken = set(map(id, linear))
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in taken]
    decay = settings.weight_decay
    muon = SharedMuon(linear, lr=settings.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw_over(rest, settings)]


def _adamw_over(parameters: Sequence[nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; only what has more than one dimension decays."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS)


#: By the name that ``moa-train --optimizer`` takes.
OPTIMIZERS: dict[str, Callable[[nn.Module, TrainSettings], list[torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
}


def optimizers_for(drafter: nn.Module, settings: TrainSettings) -> Optimizers:
    """The optimisers that ``settings.optimizer`` names, for the trained parameters of ``drafter``."""
    return Optimizers(OPTIMIZERS[settings.optimizer](drafter, settings))
