"""A whole training run: tokens, draft vocabulary, initialisation, training; resumable at every step."""

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

from moa_drafter.architectures.registry import ARCHITECTURES, initialise, new_drafter
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import CHECKPOINT_FOLDER, ConfigError, DrafterConfig, check_fit, drafter_fingerprint
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
from moa_runtime.bundle import sha256_of
from moa_runtime.errors import MoaError

_PROBE_STEPS = 10
_SAMPLES = 64  # conversations that the initialisation looks at
_HELD_OUT = 48
CHECK_STEPS = 10  # of ``--self-check``
_WARMUP_STEPS = 3  # a warm-up longer than the check would leave nothing to see
_RUN_STEPS = 1000  # of a run whose beginning this is
_CHECK_SAMPLES = 16
_WRITTEN = 24


@dataclass(frozen=True)
class Material:
    """What a run trains with: conversations, the held-out ones last, and the data's part of the record."""

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
    """Train a drafter for ``target`` in ``folder``; the checkpoint is ``folder/drafter``.

    Args:
        token_files: token stores as :func:`read_conversations` takes them.
        report: called after every step with its figures and the total number of steps.
        until: reading of ``time.monotonic`` at which to save and stop.

    Returns:
        the last evaluation: held-out ``loss``, ``tau`` of a greedy chain, ``accuracy_by_depth``; ``finished``, whether
        the last step was reached; if so, the ``sharpness`` fitted then; and the number of ``steps``.

    Raises:
        MoaError: broken token files, nothing to resume, or a folder that already holds a run.
    """
    state = folder / STATE_FILE
    if state.is_file() and not resume:
        raise MoaError(f"{folder} already holds a run: pass --resume to continue it, or choose another --out")
    if resume and not state.is_file():
        raise MoaError(f"nothing to resume in {folder}: it has no {STATE_FILE}")
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
        # Anew, for the vocabulary that was resumed.
        drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    finished = run.run(lambda figures: report(figures, settings.steps), until=until)
    figures = run.evaluate()
    if finished:
        figures["sharpness"] = run.calibrate()
    return {"finished": finished, "steps": settings.steps, **figures}


def check_names(settings: RunSettings) -> None:
    """Raise a MoaError where no architecture, loss or optimizer has the name that was given."""
    for key, known in (("arch", ARCHITECTURES), ("loss", tuple(LOSSES)), ("optimizer", tuple(OPTIMIZERS))):
        if getattr(settings, key) not in known:
            raise MoaError(f"unknown {key} {getattr(settings, key)!r}: choose one of {', '.join(known)}")


def read_material(target: Target, token_files: Sequence[Path], settings: RunSettings) -> Material:
    """Read the data; its order is fixed by the seed.

    Raises:
        MoaError: a broken file, or too few conversations.
    """
    vocab_size = target.model.config.vocab_size
    files = [(path, read_conversations(path, vocab_size=vocab_size)) for path in token_files]
    found = [c for _, conversations in files for c in conversations]
    fitting = [c for c in found if len(c) <= settings.longest]
    random.Random(settings.seed).shuffle(fitting)
    held_out = settings.held_out or min(_HELD_OUT, len(fitting) // 5)
    if not held_out:
        raise MoaError(
            f"{len(fitting)} conversations of at most {settings.longest} tokens are too few to train on: at least 5"
        )
    if held_out >= len(fitting):
        raise MoaError(f"held_out ({held_out}) leaves nothing to train on: {len(fitting)} conversations were read")
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
    """A bound drafter on the CPU: ``settings.init``, or random weights with the data's draft vocabulary.

    Raises:
        MoaError: a checkpoint that cannot be loaded or is for another target, or dimensions that there are not.
    """
    if settings.init is not None:
        drafter = load_checkpoint(settings.init)
        check_fit(drafter.config, target)
        theirs = drafter.config
        if theirs.architecture != settings.arch:
            raise MoaError(f"{settings.init} is of architecture {theirs.architecture}, not {settings.arch}")
        _check_kept(drafter, settings)
        if settings.target_layers or settings.train_target_layers:
            if not isinstance(drafter, MoADrafter):
                raise MoaError(f"layers of the target are a part of moa, and {settings.init} is {theirs.architecture}")
            drafter = with_target_layers(drafter, settings.target_layers, trained=settings.train_target_layers)
    else:
        drafter = _new_drafter(target, conversations, settings)
    drafter.bind_target(target.embedding, target.head, target.layers, target.logits)
    return drafter


def _check_kept(drafter: Drafter, settings: RunSettings) -> None:
    """Raise a MoaError where other sizes are asked for than the checkpoint to train on has: they stay as they are."""
    pairs = [("draft_vocab", settings.draft_vocab, drafter.config.draft_vocab_size)]
    if isinstance(drafter, MoADrafter):
        pairs.append(("lsa_layers", settings.lsa_layers, len(drafter.config.lsa_layers)))
    for key, wanted, has in pairs:
        if wanted is not None and wanted != has:
            raise MoaError(
                f"{key} ({wanted}) cannot be chosen for a checkpoint to train on, and {settings.init} has {has}: leave "
                f"{key} out, or leave init out"
            )


def _check_sizes(target: Target, settings: RunSettings) -> None:
    """Raise a MoaError where a new drafter is to have more than the target."""
    config = target.model.config
    for key, most in (("draft_vocab", config.vocab_size), ("lsa_layers", config.num_hidden_layers)):
        wanted = getattr(settings, key)
        if wanted is not None and wanted > most:
            raise MoaError(f"{key} ({wanted}) must be at most {most}, which is all that the target has")


def _new_drafter(target: Target, conversations: Sequence[Conversation], settings: RunSettings) -> Drafter:
    torch.manual_seed(settings.seed)
    _check_sizes(target, settings)
    size = min(settings.draft_vocab or DEFAULT_DRAFT_VOCAB, target.model.config.vocab_size)
    try:
        drafter = new_drafter(
            settings.arch,
            target,
            draft_vocab_size=size,
            lsa_layers=settings.lsa_layers or DEFAULT_LSA_LAYERS,
            target_layers=settings.target_layers,
            trained_target_layers=settings.train_target_layers,
        )
    except ConfigError as error:
        raise MoaError(str(error)) from error
    drafter.draft_to_target.copy_(torch.tensor(frequent_tokens(conversations, size, target.stop_tokens)))
    return drafter


def make_features(
    folder: Path, target: Target, conversations: Sequence[Conversation], drafter: Drafter, settings: RunSettings
) -> Features:
    """The target's states that ``drafter`` reads, as ``settings.features`` wants them."""
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
    """Start the drafter, on the CPU, from the target's weights and its states of some conversations.

    The drafter of ``settings.init`` is left as it is, unless :func:`start_drafter` gave it other target layers.
    """

    some = range(min(samples, len(conversations)))
    read = ((torch.tensor(conversations[i].tokens), features[i].to(torch.device("cpu"))) for i in some)
    if settings.init is None:
        initialise(drafter, target, read)
    elif isinstance(drafter, MoADrafter):
        was = load_checkpoint(settings.init).config
        assert isinstance(was, DrafterConfig)
        start_target_layers(drafter, was, target.model, read)


def record_run(folder: Path, target: Target, settings: RunSettings, material: Material, drafter: Drafter) -> None:
    """Write what a stranger needs to repeat the run, beside the run and beside its weights."""
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
    """How many numbers are trained."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def _steps_in(drafter: Drafter, features: Features, settings: RunSettings, material: Material, folder: Path) -> int:
    """How many steps fit into ``settings.minutes``, from the speed of a few, which take a fifth of them at most; their
    effect is thrown away."""
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
