"""Early exiting (EESD, arXiv 2406.03853): the target's first layers, and one trained layer between them and the head.

What the paper calls early-exiting layer is trained by self-distillation, on the target's own text, as every drafter
here. Its Thompson sampling chooses how long to draft: :mod:`moa_runtime.drafting.draft_controllers`, for any drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moa_drafter.config import EarlyExitConfig, FitError, Reads
from moa_drafter.drafter import TokenDrafter
from moa_drafter.llama import DecoderLayer, RMSNorm, copy_layer, frozen_layers, run_layers
from moa_drafter.target import Target
from moa_drafter.target_features import TargetStates
from moa_drafter.training.target_parts import start_norm

if TYPE_CHECKING:
    from moa_drafter.target import TargetLogits
    from moa_drafter.training.batch import Batch


class EarlyExitDrafter(TokenDrafter):
    """The trained layer and norm. The target's layers below are added by :meth:`bind_target`, frozen and not in the
    checkpoint; training reads their outputs from the target's own states."""

    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig) -> None:
        super().__init__(config)
        self.exit = DecoderLayer(config.decoder, config.rms_norm_eps)
        self.norm = RMSNorm(config.decoder.hidden_size, config.rms_norm_eps)
        self.below = nn.ModuleList()

    @property
    def reads(self) -> Reads:
        """The output of the layer below the exit, which training alone reads."""
        return Reads(inner_layers=(self.config.exit_layer - 1,))

    def bind_target(
        self, embedding: Tensor, head: Tensor, layers: Sequence[nn.Module] = (), logits: TargetLogits | None = None
    ) -> None:
        """See :meth:`Drafter.bind_target`. Raises FitError if the target's layers are too few or differ in parts or
        sizes."""
        count = self.config.exit_layer
        if len(layers) < count:
            raise FitError(f"bind the target's first {count} layers too", code="layers_missing")
        super().bind_target(embedding, head, layers, logits)
        self.below = frozen_layers(layers[:count], self.config.decoder, self.config.rms_norm_eps).to(self.embedding)

    @property
    def device_layers(self) -> Sequence[DecoderLayer]:
        return [*self.below, self.exit]  # type: ignore[list-item]

    def predict(self, batch: Batch) -> Tensor:
        """See :meth:`Drafter.predict`."""
        x, angles = batch.states.inner[:, 0], self.angles(batch.positions)
        hidden, _ = run_layers([self.exit], x, angles, batch.self_mask, batch.queries)
        return self.norm(hidden)

    @torch.no_grad()
    def initialise(self, target: Target, samples: Iterable[tuple[Tensor, TargetStates]] = ()) -> None:
        """Start as the target's last layer and norm; samples are not used."""
        copy_layer(self.exit, target.layers[-1])
        start_norm(self.norm, target.model.model)
