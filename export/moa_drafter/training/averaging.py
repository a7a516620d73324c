"""An exponential moving average of the weights, which drafts better than the last step's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Average of a model's parameters over the steps so far.

    Early on the average follows faster, so that it forgets the initial weights:
    step ``n`` counts with ``1 - min(decay, (1 + n) / (10 + n))``.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._decay = decay
        self.weights: list[Tensor] = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters behind optimiser step ``step``, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.weights, [p.detach() for p in self._parameters], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average for weights while this lasts."""
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
