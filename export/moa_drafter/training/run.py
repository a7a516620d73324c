"""A whole training run: tokens, draft vocabulary, initialisation, training; resumable at every step."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import config_for_target
from moa_drafter.fit import check_fit
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.training.data import Conversation, frequent_tokens, read_conversations
from moa_drafter.training.features import FeatureStore
from moa_drafter.training.initialise import initialise_from_target
from moa_drafter.training.trainer import STATE_FILE, Trainer, TrainSettings
from moa_runtime.errors import MoaError

_PROBE_STEPS = 10
_SAMPLES = 64  # conversations that the initialisation looks at


@dataclass(frozen=True)
class RunSettings:
    """What to train on and for how long. ``minutes`` fixes the number of steps from the speed of the first
    ten, when ``training.steps`` is 0; ``held_out`` conversations are for evaluation only. ``initial`` is a
    checkpoint to train on, instead of starting from the target's weights; it keeps its draft vocabulary."""

    training: TrainSettings
    draft_vocab_size: int = 16384
    lsa_layers: int = 6
    held_out: int = 48
    longest: int = 448
    conversations: int | None = None
    minutes: float | None = None
    initial: Path | None = None


def train_run(
    target: Target,
    token_files: Sequence[Path],
    folder: Path,
    settings: RunSettings,
    *,
    resume: bool,
    report: Callable[[dict[str, float], int], None],
) -> dict[str, object]:
    """Train a drafter for ``target`` in ``folder``; the checkpoint is ``folder/drafter``.

    Args:
        token_files: token stores as :func:`read_conversations` takes them.
        report: called after every step with its figures and the total number of steps.

    Returns:
        the last evaluation: held-out ``loss``, ``tau`` of a greedy chain, ``accuracy_by_depth``.

    Raises:
        MoaError: broken token files, nothing to resume, or a folder that already holds a run.
    """
    state = folder / STATE_FILE
    if state.is_file() and not resume:
        raise MoaError(f"{folder} already holds a run: pass --resume to continue it, or choose another --out")
    if resume and not state.is_file():
        raise MoaError(f"nothing to resume in {folder}: it has no {STATE_FILE}")
    conversations, validation = _split(target, token_files, settings)
    drafter = _initial_drafter(target, settings.initial) or _new_drafter(target, conversations, settings)
    drafter.bind_target(target.embedding, target.head, target.layers)
    features = FeatureStore(folder / "features", target, conversations, drafter.reads)
    steps = json.loads((folder / "run.json").read_text())["steps"] if resume else settings.training.steps
    if not resume and settings.initial is None:
        samples = range(min(_SAMPLES, len(conversations)))
        initialise_from_target(
            drafter, target.model, ((torch.tensor(conversations[i].tokens), features[i]) for i in samples)
        )

    def trainer(total: int) -> Trainer:
        return Trainer(drafter, conversations, features, replace(settings.training, steps=total), folder, validation)

    if not steps:
        steps = _steps_in(trainer, settings.minutes or 0.0)
    (folder / "run.json").write_text(json.dumps({"steps": steps}) + "\n")
    run = trainer(steps)
    if resume:
        run.resume()
        drafter.bind_target(target.embedding, target.head, target.layers)  # for the vocabulary that was resumed
    run.run(lambda figures: report(figures, steps))
    return run.evaluate()


def _split(target: Target, token_files: Sequence[Path], settings: RunSettings) -> tuple[list[Conversation], list[int]]:
    """Conversations in an order fixed by the seed, the held-out ones last."""
    vocab_size = target.model.config.vocab_size
    found = [c for path in token_files for c in read_conversations(path, vocab_size=vocab_size)]
    fitting = [c for c in found if len(c) <= settings.longest]
    random.Random(settings.training.seed).shuffle(fitting)
    held_out = min(settings.held_out, len(fitting) // 5)
    if not held_out:
        raise MoaError(f"{len(fitting)} conversations are too few to train on: give at least 5")
    most = len(fitting) if settings.conversations is None else settings.conversations + held_out
    chosen = fitting[held_out:most] + fitting[:held_out]
    return chosen, list(range(len(chosen) - held_out, len(chosen)))


def _new_drafter(target: Target, conversations: Sequence[Conversation], settings: RunSettings) -> MoADrafter:
    torch.manual_seed(settings.training.seed)
    config = config_for_target(
        target.model.config,
        draft_vocab_size=settings.draft_vocab_size,
        lsa_layers=settings.lsa_layers,
        target_fingerprint=target.fingerprint,
    )
    drafter = MoADrafter(config)
    vocabulary = frequent_tokens(conversations, config.draft_vocab_size, target.stop_tokens)
    drafter.draft_to_target.copy_(torch.tensor(vocabulary))
    return drafter.to(target.device)


def _initial_drafter(target: Target, folder: Path | None) -> MoADrafter | None:
    """The checkpoint to train on, if there is one.

    Raises:
        MoaError: it cannot be loaded, or is for another target.
    """
    if folder is None:
        return None
    drafter = load_checkpoint(folder)
    check_fit(drafter.config, target)
    return drafter.to(target.device)


def _steps_in(trainer: Callable[[int], Trainer], minutes: float) -> int:
    """How many steps fit into ``minutes``, from the speed of a few; their effect is thrown away."""
    probe = trainer(_PROBE_STEPS)
    before = {name: tensor.clone() for name, tensor in probe.drafter.state_dict().items()}
    began = time.monotonic()
    probe.advance(_PROBE_STEPS, lambda figures: None)
    seconds = (time.monotonic() - began) / _PROBE_STEPS
    probe.drafter.load_state_dict(before)
    return max(_PROBE_STEPS, int(60 * minutes / seconds) - _PROBE_STEPS)
