"""From a target and a drafter to a bundle that has been checked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moa_drafter.architectures.registry import torch_backend_of
from moa_drafter.checkpoint import load_checkpoint
from moa_drafter.config import check_fit, drafter_fingerprint
from moa_drafter.drafter import Drafter
from moa_drafter.pretrained import checkpoint_of
from moa_drafter.target import Target, load_target
from moa_drafter.target_folder import write_tensors
from moa_drafter.target_source import DEFAULT_TARGET, check_target, resolve_target, shown_name
from moa_export.bundle_readme import write_readme
from moa_export.bundle_writer import rejected_path, staged_bundle
from moa_export.errors import ExportError, ParityError
from moa_export.fit_stopping import fit_stopping_rule
from moa_export.golden_step import worked_example
from moa_export.gptq import calibrate, needs_calibration
from moa_export.graph_files import NOT_ASKED, TARGET, size_of
from moa_export.offline_model import WriterSettings, make_writer, prove_writers
from moa_export.plain_bundle import plain_facts, write_drafter_texts, write_texts
from moa_export.progress import Progress
from moa_export.quarot import rotate_residual_stream
from moa_export.recipe import Recipe
from moa_export.recordings import CALIBRATION_PROMPTS, PROMPTS, record
from moa_export.targets import target_of
from moa_export.targets.base import ExportTarget, NotRun, StandIn, TargetOptions
from moa_export.validation import Made, Proof, Reference, prove, reference_of, unproved
from moa_runtime.backends.base import Backend
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle, write_manifest
from moa_runtime.manifest import TargetEntry

#: Bytes of weights from which on a target is run in bfloat16: stored so, it is mapped from disk, and float32 would take
#: twice its size of memory.
_LARGE = 4 * 10**9


@dataclass(frozen=True)
class ExportSettings:
    """What to export.

    Attributes:
        targets: export targets by name.
        model: a target model's name or folder.
        drafter: folder of a checkpoint; None for :func:`export_plain`.
        questions: the graphs are checked on the answers to these.
        writer: which model writes offline.
        checked: whether the graphs are compared with PyTorch.
    """

    targets: tuple[str, ...]
    drafter: Path | None
    model: str = DEFAULT_TARGET
    recipe: Recipe = field(default_factory=Recipe)
    options: TargetOptions = field(default_factory=TargetOptions)
    questions: Sequence[str] = PROMPTS
    writer: WriterSettings = field(default_factory=WriterSettings)
    checked: bool = True


@dataclass(frozen=True)
class Report:
    """What an export made.

    Attributes:
        bytes: the whole bundle.
        seconds: wall-clock time of the whole export.
        made: the device half's graphs, by their names in the manifest.
        notes: what the user should know though it is no error.
        writers: the offline writer's graphs, by their names in messages.
    """

    bundle: Path
    bytes: int
    seconds: float
    made: Mapping[str, Made]
    notes: tuple[str, ...]
    writers: Mapping[str, Made]


def export_bundle(out: Path, settings: ExportSettings, progress: Progress, *, force: bool = False) -> Report:
    """Write a bundle to ``out``, every graph of it compared with PyTorch.

    Raises:
        MoaError: bad input; the message says what to do.
        ParityError: a graph strays beyond the recipe's tolerance; the files are in ``OUT.rejected``.
    """
    assert settings.drafter is not None
    began = time.monotonic()
    exporters = {name: target_of(name)(settings.recipe, settings.options) for name in settings.targets}
    with staged_bundle(out, force=force) as stage:
        with progress.stage("loading the drafter and the target"):
            drafter, target, notes = load(settings)
        for exporter in exporters.values():
            exporter.check(drafter.config)
        context, name = target.model.config.max_position_embeddings, shown_name(settings.model)
        made_of = settings.drafter, drafter.config, settings.recipe
        manifest = write_drafter_texts(stage, target, name, context, *made_of)
        with progress.stage("recording conversations of the target"):
            recordings = record(target, drafter, settings.questions) if settings.checked else []
            others = record(target, drafter, CALIBRATION_PROMPTS) if needs_calibration(settings.recipe) else []
        writers, more = make_writer(settings.writer, target, recordings, stage, progress, exporters)
        notes += more
        del target  # may be large, and the drafter holds what is still needed of it
        reference = None
        if settings.checked:
            reference = reference_of(drafter, recordings, settings.recipe, manifest.stop_tokens, progress)
            with progress.stage("finding where the drafter should stop", len(recordings)) as advance:
                backend = torch_backend_of(drafter, top_k=settings.recipe.top_k)
                rule = fit_stopping_rule(backend, recordings, manifest.stop_tokens, advance)
            manifest = dataclasses.replace(manifest, manners=rule)
        made: dict[str, Made] = {}
        examples: dict[str, Any] = {}
        for name, exporter in exporters.items():
            if not exporter.rotates:
                made |= _make(name, exporter, drafter, stage, reference, progress, examples)
        drafter = rotate_residual_stream(drafter)
        if others:
            with progress.stage("rounding with an eye on real inputs"):
                drafter = calibrate(drafter, others, settings.recipe)
        for name, exporter in exporters.items():
            if exporter.rotates:
                made |= _make(name, exporter, drafter, stage, reference, progress, examples)
        with progress.stage("writing the bundle"):
            entries = {name: one.entry for name, one in made.items()}
            manifest = dataclasses.replace(manifest, targets=entries, **_fields(writers))
            write_readme(stage, manifest, examples)
            write_manifest(stage, manifest)
        _check_proofs({**made, **writers}, out)
    return Report(out, size_of(out), time.monotonic() - began, made, notes, writers)


def export_plain(
    out: Path, settings: ExportSettings, architecture: str, progress: Progress, *, force: bool = False
) -> Report:
    """Write a bundle without a drafter's graph, with a writer, to ``out``.

    Args:
        architecture: one of :data:`moa_runtime.options.WITHOUT_GRAPH`.

    Raises:
        MoaError: see :func:`export_bundle`.
    """
    began = time.monotonic()
    with staged_bundle(out, force=force) as stage:
        with progress.stage("loading the target"):
            facts = plain_facts(settings.model)
            target = _load_target(facts.folder)
        manifest = write_texts(stage, facts, shown_name(settings.model), architecture)
        with progress.stage("recording conversations of the target"):
            recordings = record(target, None, settings.questions) if settings.checked else []
        exporters = {name: target_of(name)(settings.recipe, settings.options) for name in settings.targets}
        writers, notes = make_writer(settings.writer, target, recordings, stage, progress, exporters)
        manifest = dataclasses.replace(manifest, **_fields(writers))
        write_readme(stage, manifest, {})
        write_manifest(stage, manifest)
        _check_proofs(writers, out)
    return Report(out, size_of(out), time.monotonic() - began, {}, notes, writers)


def _fields(writers: Mapping[str, Made]) -> dict[str, TargetEntry]:
    """Return the fields of a manifest."""
    return {name.replace(" ", "_"): one.entry for name, one in writers.items()}


def _check_proofs(graphs: Mapping[str, Made], out: Path) -> None:
    if failures := [f"{name}: {reason}" for name, one in graphs.items() for reason in one.proof.failures]:
        raise ParityError(
            f"what was exported differs too much from PyTorch ({'; '.join(failures)}); "
            f"the files are in {rejected_path(out)}",
            code="too_far",
        )


def load(settings: ExportSettings) -> tuple[Drafter, Target, tuple[str, ...]]:
    """Drafter, bound to its target, the target, and notes for the user.

    Raises:
        MoaError: one that cannot be loaded, or two that do not fit together.
    """
    assert settings.drafter is not None
    drafter = load_checkpoint(settings.drafter)
    target = _load_target(resolve_target(settings.model))
    note = check_fit(drafter.config, target)
    drafter.bind_target(target.embedding, target.head, target.layers)
    drafter.sharpen()
    return drafter, target, (note,) if note else ()


def _load_target(folder: Path) -> Target:
    write_tensors(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return load_target(str(folder), dtype=torch.bfloat16 if size > _LARGE else torch.float32)


def plan(settings: ExportSettings) -> dict[str, Any]:
    """Return what :func:`export_bundle` would make; refuse all bad input that can be found before the work.

    Raises:
        MoaError: bad input.
    """
    check_target(settings.model)
    planned = {"target": settings.model, "targets": list(settings.targets)}
    if settings.drafter is None:
        return {**planned, "targets": [], "parameters": 0, "drafter": ""}
    drafter = load_checkpoint(settings.drafter)
    for name in settings.targets:
        target_of(name)(settings.recipe, settings.options).check(drafter.config)
    count = sum(tensor.numel() for tensor in drafter.parameters())
    return {**planned, "parameters": count, "drafter": drafter_fingerprint(settings.drafter)}


def _make(
    name: str,
    exporter: ExportTarget,
    drafter: Drafter,
    stage: Path,
    reference: Reference | None,
    progress: Progress,
    examples: dict[str, Any],
) -> dict[str, Made]:
    """Export the graphs of one target, and prove each against ``reference`` unless that is None. ``examples`` get a
    worked example of each that runs here, by its name, if the architecture is that of the samples in the README."""
    began = time.monotonic()
    with progress.stage(f"{name}: exporting"):
        entries = exporter.export(drafter, stage)
    made = {}
    for name, entry in entries.items():
        proof, runner = unproved(NOT_ASKED, "parity", "tau"), exporter.runner(stage, entry)
        backend = runner.backend if isinstance(runner, StandIn) else runner
        if name in ("onnx", "web"):  # the same numbers with and without Node, and without torch
            backend = OnnxBackend(stage / entry.file)
        if not isinstance(backend, NotRun) and drafter.config.architecture == "moa":
            examples[name] = worked_example(backend)
        if reference is not None:
            proof = _prove(name, runner, reference, progress)
        now = time.monotonic()
        made[name] = Made(dataclasses.replace(entry, checks=proof.checks), proof, now - began)
        began = now
    return made


def _prove(name: str, runner: Backend | NotRun | StandIn, reference: Reference, progress: Progress) -> Proof:
    with progress.stage(f"{name}: comparing with PyTorch", 1 + len(reference.recordings)) as advance:
        return prove(runner, reference, advance)


def prove_again(
    bundle: Bundle, *, model: str | None, drafter: str | None, writer: str | None, npm: bool, progress: Progress
) -> dict[str, Proof]:
    """Compare every graph of ``bundle`` with PyTorch, as the export did.

    Args:
        model, drafter, writer: what it was exported from; the defaults when omitted, for the writer the target.
        npm: whether npm may install onnxruntime-web.

    Returns:
        proofs by the graphs' names, those of the writers by :func:`moa_export.graph_files.writer_name`.

    Raises:
        ExportError: the bundle was made from another target or drafter.
        MoaError: one of them cannot be loaded.
    """
    names = tuple(bundle.manifest.targets)
    recipe = Recipe.from_description(bundle.manifest.recipe)
    checkpoint = checkpoint_of(drafter)
    settings = ExportSettings(names, checkpoint, model=model or DEFAULT_TARGET, recipe=recipe)
    with progress.stage("loading the drafter and the target"):
        module, target, _ = load(settings)
    made_from = bundle.manifest.fingerprints
    for kind, own, expected in (
        ("target", target.fingerprint, made_from.target),
        ("drafter", drafter_fingerprint(checkpoint), made_from.drafter),
    ):
        if own != expected:
            raise ExportError(
                f"the bundle was made from the {kind} {expected}, this is {own}: give the one it was made from "
                f"with --{'model' if kind == 'target' else 'drafter'}",
                code="other_model",
            )
    with progress.stage("recording conversations of the target"):
        recordings = record(target, module, settings.questions)
    proofs = prove_writers(bundle, writer or TARGET, target, recordings, progress, npm=npm)
    reference = reference_of(module, recordings, recipe, target.stop_tokens, progress)
    del module, target  # a graph may need as much memory
    for name in names:
        # "executorch-vulkan" was made by the target "executorch".
        exporter = target_of(name.partition("-")[0])(recipe, TargetOptions(npm=npm))
        entry = bundle.manifest.targets[name]
        proofs[name] = _prove(name, exporter.runner(bundle.folder, entry), reference, progress)
    return proofs
