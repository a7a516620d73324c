"""A small language model beside the target: MoA without memory rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import IndependentConfig, Reads
from moa_drafter.drafter import TokenDrafter
from moa_drafter.llama import DecoderLayer, RMSNorm, run_layers
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.target_parts import start_layer, start_norm

if TYPE_CHECKING:
    from moa_drafter.training.batch import Batch


class IndependentDrafter(TokenDrafter):
    """Decoder layers and a norm between the target's frozen embedding and head."""

    config: IndependentConfig

    def __init__(self, config: IndependentConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(DecoderLayer(config.decoder, config.rms_norm_eps) for _ in range(config.layers))
        self.norm = RMSNorm(config.decoder.hidden_size, config.rms_norm_eps)

    @property
    def reads(self) -> Reads:
        """An empty set: nothing of the target is read."""
        return Reads()

    @property
    def device_layers(self) -> Sequence[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict`."""
        x, angles = self.embed(batch.tokens), self.angles(batch.positions)
        hidden, _ = run_layers(self.device_layers, x, angles, batch.self_mask, batch.queries)
        return self.norm(hidden)

    @torch.no_grad()
    def initialise(self, target: Target, samples: Iterable[tuple[Tensor, TargetStates]] = ()) -> None:
        """Start as the target's first layers, its last layer above them, and its norm; samples are not used."""
        first = self.config.layers - 1
        for ours, theirs in zip(self.device_layers, [*target.layers[:first], target.layers[-1]], strict=True):
            start_layer(ours, theirs)
        start_norm(self.norm, target.model.model)
