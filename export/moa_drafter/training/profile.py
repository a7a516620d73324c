"""A short training run: does the loss fall, how many tokens a second are trained, which parts take the time."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moa_drafter.progress import Progress
from moa_drafter.target import Target
from moa_drafter.training.decoding import TransformersDecoder
from moa_drafter.training.generation import generate_conversations
from moa_drafter.training.settings import RunSettings
from moa_drafter.training.train import initialise_drafter, make_features, read_material, start_drafter
from moa_drafter.training.trainer import Stopwatch, Trainer

STEPS = 10
_WARMUP_STEPS = 3  # a warm-up longer than the check would leave nothing to see
_RUN_STEPS = 1000  # of a run whose beginning this is
_SAMPLES = 16
_WRITTEN = 24


def check(
    target: Target, token_files: Sequence[Path], settings: RunSettings, steps: int, *, must_fall: bool
) -> dict[str, Any]:
    """Train ``steps`` steps in a scratch folder at the run's own settings, but for a short warm-up.

    Args:
        token_files: without one, the target writes a few short conversations first.
        must_fall: whether a loss that does not fall is a failure.

    Returns:
        the loss (nats) of the first steps' micro-batches before and after, ``tokens_per_second`` (prompts
        counted, the first step not), ``shares`` of the time by part, ``seconds``, and on failure ``failed``, a
        sentence.
    """
    began = time.monotonic()
    settings = replace(
        settings, steps=max(settings.steps, _RUN_STEPS), warmup_steps=min(settings.warmup_steps, _WARMUP_STEPS)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if not token_files:
            token_files = (_write(target, settings, folder),)
            settings = replace(settings, held_out=None)  # so few are written that a fifth has to do
        material = read_material(target, token_files, settings)
        drafter = start_drafter(target, material.conversations, settings)
        features = make_features(folder, target, material.conversations, drafter, settings)
        initialise_drafter(drafter, target, material.conversations, features, settings, _SAMPLES)
        trainer = Trainer(
            drafter.to(target.device), material.conversations, features, settings, folder, material.validation
        )
        seen = list(itertools.islice(trainer.order(), steps))
        before = trainer.loss(seen[0])
        stopwatch = _watched(trainer, target)
        tokens, seconds = 0, 0.0
        for number, micro_batches in enumerate(Progress(seen, desc="checking", unit="step")):
            started = time.monotonic()
            trainer.train_step(micro_batches)
            if number == 0:
                stopwatch.seconds.clear()  # it compiles, loads kernels, reserves memory
                continue
            seconds += time.monotonic() - started
            tokens += sum(len(material.conversations[i]) for indices in micro_batches for i in indices)
        stopwatch.on = False
        trainer.step = 0  # the same masks as before
        after = trainer.loss(seen[0])
    result = {
        "steps": steps,
        "loss_before": before,
        "loss_after": after,
        "tokens_per_second": tokens / seconds,
        "shares": stopwatch.shares(),
        "seconds": time.monotonic() - began,
    }
    if must_fall and not after < before:
        result["failed"] = f"the loss does not fall: {before:.3f} nats before {steps} steps, {after:.3f} after them"
    return result


def _watched(trainer: Trainer, target: Target) -> Stopwatch:
    """Switch the trainer's stopwatch on, timing the target's forward and the layer self-attention separately."""
    watch = trainer.stopwatch
    watch.on = True
    body = target.model.model
    body.forward = watch.watch("target forward", body.forward)
    # Parts of a compiled forward cannot be timed.
    if not trainer.settings.compile and hasattr(trainer.drafter, "aggregate"):
        trainer.drafter.aggregate = watch.watch("layer self-attention", trainer.drafter.aggregate)
    return watch


def _write(target: Target, settings: RunSettings, folder: Path) -> Path:
    file = folder / "conversations.jsonl"
    brief = replace(
        settings,
        conversations=_WRITTEN,
        write_batch=_WRITTEN,
        prompt_tokens=min(settings.prompt_tokens, 32),
        answer_tokens=min(settings.answer_tokens, 48),
    )
    # Whatever the writer: vLLM's start would take longer than this.
    generate_conversations(TransformersDecoder(target), file, brief, prompts=settings.prompts, report=lambda held: None)
    return file
