"""A training run: tokens, draft vocabulary, initialisation, training; and a short one that is profiled."""

from __future__ import annotations

import itertools
import math
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moa_drafter.architectures.registry import initialise, new_drafter
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import CHECKPOINT_FOLDER, CONFIGS, DrafterConfig, check_fit, drafter_fingerprint
from moa_drafter.drafter import Drafter
from moa_drafter.model import MoADrafter
from moa_drafter.progress import Progress
from moa_drafter.target import Target
from moa_drafter.training import distributed as processes
from moa_drafter.training.data import Conversation, check_card, frequent_tokens, read_conversations
from moa_drafter.training.features import Features, FeatureStore, LiveFeatures
from moa_drafter.training.generation import TransformersDecoder, generate_conversations
from moa_drafter.training.initialise import start_target_layers, with_target_layers
from moa_drafter.training.losses import LOSSES
from moa_drafter.training.optimizers import OPTIMIZERS
from moa_drafter.training.settings import (
    DEFAULT_DRAFT_VOCAB,
    DEFAULT_LSA_LAYERS,
    RECORD_FILE,
    RunSettings,
    plain,
    write_record,
)
from moa_drafter.training.trainer import STATE_FILE, Stopwatch, Trainer
from moa_runtime.checked_file import sha256_of
from moa_runtime.errors import MoaError

_PROBE_STEPS = 10
_SAMPLES = 64  # conversations that the initialisation looks at
_HELD_OUT = 48
CHECK_STEPS = 10  # of ``--self-check``
_WARMUP_STEPS = 3  # shorter than the check
_RUN_STEPS = 1000  # of a run whose beginning this is
_CHECK_SAMPLES = 16
_WRITTEN = 24


@dataclass(frozen=True)
class Material:
    """A run's conversations, the held-out ones last, their indices, and the data's part of the record."""

    conversations: list[Conversation]
    validation: list[int]
    record: dict[str, Any]


def train_run(
    target: Target,
    token_files: Sequence[Path],
    folder: Path,
    settings: RunSettings,
    *,
    resume: bool,
    report: Callable[[dict[str, float], int], None],
    until: float = math.inf,
) -> dict[str, object]:
    """Train a drafter for ``target`` in ``folder``; the checkpoint is ``folder/drafter``. Raises MoaError for broken
    token files, nothing to resume, or a folder that already holds a run.

    Args:
        token_files: token stores as :func:`read_conversations` takes them.
        report: called after every step with its figures and the total number of steps.
        until: reading of ``time.monotonic`` at which to save and stop.

    Returns:
        the last evaluation (see :func:`~moa_drafter.training.evaluation.evaluate`), the number of ``steps``, whether
        the last one was reached (``finished``), and if so the fitted ``sharpness``.
    """
    state = folder / STATE_FILE
    if state.is_file() and not resume:
        raise MoaError(f"{folder} already holds a run: pass --resume, or choose another --out", code="run_exists")
    if resume and not state.is_file():
        raise MoaError(f"nothing to resume in {folder}: it has no {STATE_FILE}", code="nothing_to_resume")
    material = read_material(target, token_files, settings)
    conversations = material.conversations
    drafter = start_drafter(target, conversations, settings)
    features = make_features(folder, target, conversations, drafter, settings)
    if not resume:
        initialise_drafter(drafter, target, conversations, features, settings, _SAMPLES)
    drafter.to(target.device)
    processes.copy_from_first([*drafter.parameters()])
    if not settings.steps:
        settings = replace(settings, steps=_steps_in(drafter, features, settings, material, folder), minutes=None)
    if not resume and not processes.rank():
        record_run(folder, target, settings, material, drafter)
    run = Trainer(drafter, conversations, features, settings, folder, material.validation)
    if resume:
        run.resume()
        # Again, for the resumed draft vocabulary.
        drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    finished = run.run(lambda figures: report(figures, settings.steps), until=until)
    figures = run.evaluate()
    if finished:
        figures["sharpness"] = run.calibrate()
    return {"finished": finished, "steps": settings.steps, **figures}


def check_names(settings: RunSettings) -> None:
    """Raise a MoaError for an unknown name of an architecture, a loss or an optimizer."""
    for key, known in (("arch", CONFIGS), ("loss", LOSSES), ("optimizer", OPTIMIZERS)):
        name = getattr(settings, key)
        if name not in known:
            raise MoaError(f"unknown {key} {name!r}: choose one of {', '.join(known)}", code=f"unknown_{key}")


def read_material(target: Target, token_files: Sequence[Path], settings: RunSettings) -> Material:
    """Read the data, in an order fixed by the seed. Raises MoaError for a broken file or too few conversations."""
    vocab_size = target.model.config.vocab_size
    files = [(path, read_conversations(path, vocab_size=vocab_size)) for path in token_files]
    found = [c for _, conversations in files for c in conversations]
    fitting = [c for c in found if len(c) <= settings.longest]
    random.Random(settings.seed).shuffle(fitting)
    held_out = settings.held_out or min(_HELD_OUT, len(fitting) // 5)
    if not held_out:
        raise MoaError(f"{len(fitting)} conversations within longest ({settings.longest}) are too few", code="too_few")
    if held_out >= len(fitting):
        raise MoaError(f"held_out ({held_out}) leaves nothing of {len(fitting)} conversations", code="too_few")
    most = len(fitting) if settings.conversations is None else settings.conversations + held_out
    chosen = fitting[held_out:most] + fitting[:held_out]
    sums = [sha256_of(path) for path in token_files]
    for path, sha256 in zip(token_files, sums, strict=True):
        check_card(path, sha256)
    record = {
        "files": [
            {"name": path.name, "sha256": sha256, "conversations": len(conversations)}
            for (path, conversations), sha256 in zip(files, sums, strict=True)
        ],
        "trained_on": len(chosen) - held_out,
        "held_out": held_out,
        "too_long": len(found) - len(fitting),
        "answer_tokens": sum(c.learnt for c in chosen[:-held_out]),
    }
    return Material(chosen, list(range(len(chosen) - held_out, len(chosen))), record)


def start_drafter(target: Target, conversations: Sequence[Conversation], settings: RunSettings) -> Drafter:
    """Make a bound drafter on the CPU: ``settings.init``, or random weights with the data's draft vocabulary. Raises
    MoaError if the checkpoint or the sizes do not fit the target."""
    if settings.init is not None:
        drafter = load_checkpoint(settings.init)
        check_fit(drafter.config, target)
        kind = drafter.config.architecture
        if kind != settings.arch:
            raise MoaError(f"{settings.init} is of architecture {kind}, not {settings.arch}", code="wrong_architecture")
        _check_kept(drafter, settings)
        if settings.target_layers or settings.train_target_layers:
            if not isinstance(drafter, MoADrafter):
                raise MoaError(f"target layers are a part of moa, {settings.init} is {kind}", code="wrong_architecture")
            drafter = with_target_layers(drafter, settings.target_layers, trained=settings.train_target_layers)
    else:
        drafter = _new_drafter(target, conversations, settings)
    drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    return drafter


def _check_kept(drafter: Drafter, settings: RunSettings) -> None:
    """Raise a MoaError if the settings change sizes that the checkpoint to train on fixes."""
    pairs = [("draft_vocab", settings.draft_vocab, drafter.config.draft_vocab_size)]
    if isinstance(drafter, MoADrafter):
        pairs.append(("lsa_layers", settings.lsa_layers, len(drafter.config.lsa_layers)))
    for key, wanted, has in pairs:
        if wanted is not None and wanted != has:
            raise MoaError(f"{settings.init} has {key} {has}, not {wanted}: leave it out", code="fixed_by_checkpoint")


def _new_drafter(target: Target, conversations: Sequence[Conversation], settings: RunSettings) -> Drafter:
    config = target.model.config
    for key, most in (("draft_vocab", config.vocab_size), ("lsa_layers", config.num_hidden_layers)):
        wanted = getattr(settings, key)
        if wanted is not None and wanted > most:
            raise MoaError(f"{key} ({wanted}) must be at most {most}, the target's number", code="out_of_range")
    torch.manual_seed(settings.seed)
    size = min(settings.draft_vocab or DEFAULT_DRAFT_VOCAB, config.vocab_size)
    drafter = new_drafter(
        settings.arch,
        target,
        draft_vocab_size=size,
        lsa_layers=settings.lsa_layers or DEFAULT_LSA_LAYERS,
        target_layers=settings.target_layers,
        trained_target_layers=settings.train_target_layers,
    )
    drafter.draft_to_target.copy_(torch.tensor(frequent_tokens(conversations, size, target.stop_tokens)))
    return drafter


def make_features(
    folder: Path, target: Target, conversations: Sequence[Conversation], drafter: Drafter, settings: RunSettings
) -> Features:
    """Open the target's states that ``drafter`` reads, on disk or live as ``settings.features`` says."""
    live = settings.features == "live" or (settings.features == "auto" and target.device.type == "cuda")
    if live:
        return LiveFeatures(target, conversations, drafter.reads)
    with processes.first_alone():
        return FeatureStore(folder / "features", target, conversations, drafter.reads)


def initialise_drafter(
    drafter: Drafter,
    target: Target,
    conversations: Sequence[Conversation],
    features: Features,
    settings: RunSettings,
    samples: int,
) -> None:
    """Start the drafter, on the CPU, from the target's weights and its states of some conversations. That of
    ``settings.init`` stays as it is, unless :func:`start_drafter` gave it other target layers."""
    some = range(min(samples, len(conversations)))
    read = ((torch.tensor(conversations[i].tokens), features[i].to(torch.device("cpu"))) for i in some)
    if settings.init is None:
        initialise(drafter, target, read)
    elif isinstance(drafter, MoADrafter):
        was = load_checkpoint(settings.init).config
        assert isinstance(was, DrafterConfig)
        start_target_layers(drafter, was, target.model, read)


def record_run(folder: Path, target: Target, settings: RunSettings, material: Material, drafter: Drafter) -> None:
    """Write everything needed to repeat the run, beside the run and beside its weights."""
    import transformers

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    rest = {
        "data": material.record,
        "target": {"name": target.folder.name, "fingerprint": target.fingerprint},
        "parameters": parameters_of(drafter),
        "versions": {**versions, "transformers": transformers.__version__},
        **({"init": drafter_fingerprint(settings.init)} if settings.init else {}),
        "machine": {"device": target.device.type, "processes": processes.count(), "processor": platform.machine()},
    }
    write_record(folder / RECORD_FILE, {"settings": plain(settings), **rest})
    write_record(folder / CHECKPOINT_FOLDER / RECORD_FILE, {"settings": plain(settings, names_only=True), **rest})


def parameters_of(drafter: Drafter) -> int:
    """Count the trained parameters."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def _steps_in(drafter: Drafter, features: Features, settings: RunSettings, material: Material, folder: Path) -> int:
    """Return the number of steps that fit into ``settings.minutes``, from the speed of a few, which take a fifth of the
    time at most and are undone."""
    minutes = settings.minutes or 0
    brief = replace(settings, steps=_PROBE_STEPS)
    probe = Trainer(drafter, material.conversations, features, brief, folder, material.validation)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    began = time.monotonic()
    with Progress(total=_PROBE_STEPS, desc="timing steps", unit="step", disable=bool(processes.rank())) as bar:
        probe.advance(_PROBE_STEPS, lambda figures: bar.update() and None, until=began + 60 * minutes / 5)
    seconds = (time.monotonic() - began) / probe.step
    drafter.load_state_dict(before)
    steps = torch.tensor([max(_PROBE_STEPS, int(60 * minutes / seconds) - probe.step)])
    steps = steps.to(drafter.head.device)
    processes.copy_from_first([steps])
    return int(steps)


def profile_run(
    target: Target, token_files: Sequence[Path], settings: RunSettings, steps: int, *, must_fall: bool
) -> dict[str, Any]:
    """Train ``steps`` steps in a scratch folder at the run's own settings, but for a short warm-up.

    Args:
        token_files: if empty, the target writes a few short conversations first.
        must_fall: whether a loss that does not fall is a failure.

    Returns:
        loss (nats) on the first step's micro-batches before and after, ``tokens_per_second`` (with prompts, without the
        first step), ``shares`` of the time by part, ``seconds``, and on failure a sentence, ``failed``.
    """
    began = time.monotonic()
    settings = replace(
        settings, steps=max(settings.steps, _RUN_STEPS), warmup_steps=min(settings.warmup_steps, _WARMUP_STEPS)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if not token_files:
            token_files = (_write(target, settings, folder),)
            settings = replace(settings, held_out=None)  # a fifth of the few that are written
        material = read_material(target, token_files, settings)
        drafter = start_drafter(target, material.conversations, settings)
        features = make_features(folder, target, material.conversations, drafter, settings)
        initialise_drafter(drafter, target, material.conversations, features, settings, _CHECK_SAMPLES)
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
                stopwatch.seconds.clear()  # the first step compiles, loads kernels and reserves memory
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
    """Switch the trainer's stopwatch on, with the target's forward and the layer self-attention as parts."""
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
    # Never with vLLM, whose start would take longer than this.
    generate_conversations(TransformersDecoder(target), file, brief, prompts=settings.prompts, report=lambda held: None)
    return file
