"""What changes over a run: learning rate and future lengths, as functions of settings and step number."""

from __future__ import annotations

import math
from dataclasses import replace

from moa_drafter.training.masks import FutureLengths, future_lengths_at
from moa_drafter.training.settings import TrainSettings


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def future_lengths(settings: TrainSettings, step: int) -> FutureLengths:
    """The curriculum's stage, its last one as the settings want it."""
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
