"""Features of an EAGLE-3 head in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moa_drafter.architectures.eagle3 import Eagle3Drafter


class TorchFusion:
    """The features of an EAGLE-3 head. Implements :class:`moa_server.engine.target_pass.Fusion`.

    Args:
        drafter: with the layers of its target.
    """

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self._drafter = drafter
        self.inner_layers, self.size = drafter.row_reads.inner_layers, drafter.config.decoder.hidden_size

    def __call__(self, states: Sequence[Tensor]) -> Tensor:
        """See :class:`moa_server.engine.target_pass.Fusion`."""
        return self._drafter.features(torch.stack(list(states), 1).to(self._drafter.fc.weight))
