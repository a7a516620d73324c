"""Optimizers (AdamW, or Muon for matrices and AdamW for the rest), their schedules, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moa_drafter.training import distributed as processes
from moa_drafter.training.batch import FutureLengths, future_lengths_at
from moa_drafter.training.settings import TrainSettings

_BETAS = (0.9, 0.95)


class Optimizers:
    """Several torch optimisers that step as one, at one learning rate; each trained parameter belongs to one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    def step(self, rate: float) -> None:
        """Take one step along the gradients, at learning rate ``rate``."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state from which :meth:`load_state_dict` continues exactly."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from a :meth:`state_dict`."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def _adamw(drafter: nn.Module, settings: TrainSettings) -> Optimizers:
    return Optimizers([_adamw_over([p for p in drafter.parameters() if p.requires_grad], settings)])


def _muon(drafter: nn.Module, settings: TrainSettings) -> Optimizers:
    """Muon (Jordan et al. 2024) for the weights of linear layers, its steps scaled to the size of AdamW's (arXiv
    2502.16982, section 2.2), so that one rate serves both."""
    linear = [m.weight for m in drafter.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    taken = set(map(id, linear))
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in taken]
    decay = settings.weight_decay
    muon = SharedMuon(linear, lr=settings.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return Optimizers([muon, _adamw_over(rest, settings)])


def _adamw_over(parameters: Sequence[nn.Parameter], settings: TrainSettings) -> torch.optim.Optimizer:
    """Make an AdamW with weight decay for parameters of two dimensions or more only."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS)


#: By the name that ``moa-train --optimizer`` takes.
OPTIMIZERS: dict[str, Callable[[nn.Module, TrainSettings], Optimizers]] = {"adamw": _adamw, "muon": _muon}


class SharedMuon(torch.optim.Muon):
    """:class:`torch.optim.Muon` for processes that hold the same weights and gradients.

    Each matrix has an owner, the process that orthogonalises it, which is most of the work of a step, and sends it to
    the others. Momentum stays with the owner until :meth:`state_dict`, which every process must call.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See :class:`torch.optim.Muon`; discards the gradients of other owners' matrices."""
        matrices, owners = self._owned()
        for matrix, owner in zip(matrices, owners, strict=True):
            if owner != processes.rank():
                matrix.grad = None  # the optimiser skips it then
        loss = super().step(closure)
        processes.copy_from(owners, matrices)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """See :class:`torch.optim.Muon`; the same in every process."""
        matrices, owners = self._owned()
        for matrix in matrices:
            self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        processes.copy_from(owners, [self.state[matrix]["momentum_buffer"] for matrix in matrices])
        return super().state_dict()

    def _owned(self) -> tuple[list[Tensor], list[int]]:
        """Return all matrices, and the rank of the process that owns each."""
        matrices = [matrix for group in self.param_groups for matrix in group["params"]]
        # Products of the smaller side with itself and with the matrix.
        costs = [min(matrix.shape) ** 2 * sum(matrix.shape) for matrix in matrices]
        return matrices, share_out(costs, processes.count())


def share_out(costs: Sequence[float], count: int) -> list[int]:
    """Assign each piece of work to one of ``count`` workers: the most expensive first, to the worker with the least
    work. ``share_out([1, 4, 3], 2)`` is ``[1, 0, 1]``."""
    owners, loads = [0] * len(costs), [0.0] * count
    for piece in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[piece] = loads.index(min(loads))
        loads[owners[piece]] += costs[piece]
    return owners


class WeightAverage:
    """Exponential moving average of a model's parameters, which drafts better than the weights of the last step.

    It forgets the initial weights early: step ``n`` counts with ``1 - min(decay, (1 + n) / (10 + n))``.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._decay = decay
        self.weights: list[Tensor] = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after optimizer step ``step``, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.weights, [p.detach() for p in self._parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the average as the model's weights in the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self.weights, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to the final rate."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def future_lengths(settings: TrainSettings, step: int) -> FutureLengths:
    """Return the curriculum's stage at a step; the settings change its last stage."""
    stage = future_lengths_at(step / settings.steps, continued=settings.curriculum == "none")
    if not stage.long_share:
        return stage
    wanted = {
        "high": settings.future_high,
        "long_share": settings.long_share,
        "longest": settings.longest_future,
        "no_rows_share": settings.no_rows_share,
    }
    return replace(stage, **{name: value for name, value in wanted.items() if value is not None})
