"""The offline writer of a bundle: a whole model that the device writes with while it has no verifier."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from moa_decoder.errors import TargetError
from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import Target, load_target
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import shown_name
from moa_export.errors import ExportError
from moa_export.graph_files import NOT_ASKED, TARGET, WRITER, usual_bits, writer_bits, writer_details, writer_name
from moa_export.progress import Advance, Progress
from moa_export.recipe import Recipe
from moa_export.recordings import Recording
from moa_export.targets import TARGETS, target_of
from moa_export.targets.base import ExportTarget, TargetOptions, WriterTarget
from moa_export.targets.onnx import OnnxTarget
from moa_export.validation import Check, Made, Proof, check, proof_of, unproved
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.bundle import Bundle
from moa_runtime.manifest import TargetEntry

#: Most parameters of a target that is its own writer; a larger one needs a small sibling.
LARGEST = 500_000_000
#: Most that rounding may multiply the perplexity by.
_MOST_RATIO = 1.1
NONE = "none"


@dataclass(frozen=True)
class WriterSettings:
    """Which model writes offline.

    Attributes:
        model: ``target``, ``none``, a name or a folder; None for the target if it is small enough and loses little,
            else none.
        bits: of its layers, 4 or 8; None for those of a quantised GGUF file, else 4, or 8 if 4 lose too much.

    Raises:
        ExportError: other bits.
    """

    model: str | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8):
            raise ExportError(f"--offline-bits must be 4 or 8, not {self.bits}", code="unsupported_bits")


def model_of(settings: WriterSettings, target: Target) -> tuple[str, str]:
    """Return the model that writes, :data:`NONE` for none, and a note for the user, or the empty string."""
    if settings.model is not None:
        return settings.model, ""
    parameters = target.model.num_parameters()
    if parameters <= LARGEST:
        return TARGET, ""
    return NONE, (
        f"a target of {parameters / 1e9:.1f} billion parameters is too large to write offline: name a small sibling "
        "with --offline-model, or none"
    )


def make_writer(
    settings: WriterSettings,
    target: Target,
    recordings: Sequence[Recording],
    folder: Path,
    progress: Progress,
    exporters: Mapping[str, ExportTarget] = MappingProxyType({}),
) -> tuple[dict[str, Made], tuple[str, ...]]:
    """Write the graphs into ``folder``, and compare their perplexity of the target's answers with PyTorch's.

    Args:
        recordings: the answers; none, and nothing is compared, and 4 bits are never found too few.
        exporters: the bundle's export targets by name. Each one that can write a graph does so;
            onnxruntime's is written in any case.

    Returns:
        graphs by their names in messages, and notes for the user. No graphs where none is wanted, or where the user
        named none and the target loses too much or cannot be built; the graph of another engine is missing for the same
        reasons. Those of a model that the user named may have failed their proof.

    Raises:
        MoaError: a model that cannot be loaded or built, or one with another tokenizer.
    """
    model, note = model_of(settings, target)
    if model == NONE:
        return {}, (note,) if note else ()
    source, losses = _source(model, target, recordings, progress)

    def make(exporter: WriterTarget, name: str, bits: int) -> Made:
        began = time.monotonic()
        with progress.stage(f"offline {name}: exporting in {bits} bits"):
            entry = exporter.export_writer(RoundedWeights(weights, bits), folder)
        proof = _prove(exporter, folder, entry, recordings, losses, progress)
        details = writer_details(entry, shown_name(model), bits, source.config)
        return Made(replace(entry, details=details, checks=proof.checks), proof, time.monotonic() - began)

    def discarded(made: Made) -> bool:
        """Remove the files of a graph that failed its proof, unless the user asked for it; return whether it did."""
        if not made.proof.failures or settings.model is not None or settings.bits is not None:
            return False
        path = folder / made.entry.file
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return True

    missing = "the bundle has no offline writer: {} (--offline-model names another model, or none)"
    onnx = OnnxTarget(Recipe(), TargetOptions())
    try:
        weights = weights_of(source.folder)
        most = writer_bits(weights)
        bits = settings.bits or usual_bits(weights)
        made = make(onnx, WRITER, bits)
    except (TargetError, ExportError) as error:
        if settings.model is not None:
            text = f"{settings.model} cannot be the offline writer: {error}; name another with --offline-model, or none"
            raise ExportError(text, code=error.code) from error
        return {}, (missing.format(error),)
    notes = []
    if made.proof.failures and settings.bits is None and bits < min(most, 8):
        lost, bits = made.proof.failures[0], 8
        made = make(onnx, WRITER, bits)
        if not made.proof.failures:
            notes.append(f"the offline writer has 8 bits, for with fewer {lost}")
    if discarded(made):
        return {}, (missing.format(made.proof.failures[0]),)
    graphs = {WRITER: made}
    for each, exporter in exporters.items():
        if each == "onnx" or not isinstance(exporter, WriterTarget):
            continue
        name = writer_name(each)
        try:
            made = make(exporter, name, bits)
            reason = made.proof.failures[0] if discarded(made) else ""
        except ExportError as error:
            reason = str(error)
        if reason:
            notes.append(f"the bundle has no {name}: {reason}")
        else:
            graphs[name] = made
    return graphs, tuple(notes)


def prove_writers(
    bundle: Bundle, model: str, target: Target, recordings: Sequence[Recording], progress: Progress, *, npm: bool
) -> dict[str, Proof]:
    """Compare a bundle's writers with PyTorch, as the export did. Returns proofs by the names of messages.

    Raises:
        MoaError: see :func:`make_writer`.
    """
    found = {field.replace("_", " "): entry for field, entry in bundle.manifest.writers.items()}
    if not found:
        return {}
    _, losses = _source(model, target, recordings, progress)
    proofs, targets = {}, {writer_name(each): each for each in TARGETS}
    for name, entry in found.items():
        exporter = target_of(targets[name])(Recipe(), TargetOptions(npm=npm))
        assert isinstance(exporter, WriterTarget)
        proofs[name] = _prove(exporter, bundle.folder, entry, recordings, losses, progress)
    return proofs


def _source(
    model: str, target: Target, recordings: Sequence[Recording], progress: Progress
) -> tuple[Target, list[Sequence[float]]]:
    """Load the model; return it with its losses in PyTorch of each recorded answer's tokens (nats). Raises MoaError."""
    with progress.stage("offline writer: loading"):
        source = target if model == TARGET else load_target(model)
        if source is not target and source.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ExportError(
                f"--offline-model {model} has another tokenizer than the target, which could not read its text: choose "
                "a model of the target's family, or none",
                code="other_tokenizer",
            )
        if source is target:
            return source, [recording.losses for recording in recordings]
        return source, [losses_of(source, recording) for recording in recordings]


def _prove(
    exporter: WriterTarget,
    folder: Path,
    entry: TargetEntry,
    recordings: Sequence[Recording],
    losses: Sequence[Sequence[float]],
    progress: Progress,
) -> Proof:
    if not recordings:
        return unproved(NOT_ASKED, "perplexity")
    recordings = recordings[: exporter.writer_answers]
    before = float(np.mean(np.concatenate(losses[: exporter.writer_answers])))
    with progress.stage("offline writer: comparing with PyTorch", len(recordings)) as advance:
        runner = exporter.writer_runner(folder, entry)
        return proof_of(runner, lambda backend: {"perplexity": check_of(backend, recordings, before, advance)})


@torch.no_grad()
def losses_of(source: Target, recording: Recording) -> Sequence[float]:
    """Losses of a model at a recorded answer's tokens (nats), in PyTorch."""
    logits = source.model(torch.tensor([recording.tokens], device=source.device)).logits[0, recording.prompt - 1 : -1]
    answer = torch.tensor(recording.tokens[recording.prompt :], device=source.device)
    losses: list[float] = torch.nn.functional.cross_entropy(logits.float(), answer, reduction="none").tolist()
    return losses


def check_of(backend: Backend, recordings: Sequence[Recording], before: float, advance: Advance) -> Check:
    """Compare the perplexity of recorded answers. A token that is not among the candidates counts as the last of them.

    Args:
        before: mean loss in PyTorch (nats).
        advance: called once for each recording.
    """
    losses, agreed = [], 0
    empty = np.zeros((0, *backend.kv_shape), np.float32)
    for recording in recordings:
        answer = recording.tokens[recording.prompt :]
        inputs = StepInputs.chain(recording.tokens[:-1], (empty, empty), (empty, empty), asked=len(answer))
        result = backend.step(inputs)
        for token, tokens, logprobs in zip(answer, result.top_tokens, result.top_logprobs, strict=True):
            (at,) = np.nonzero(tokens == token)
            losses.append(-float(logprobs[at[0] if len(at) else -1]))
            agreed += bool(tokens[0] == token)
        advance()
    after = float(np.mean(losses))
    ratio = math.exp(after - before)
    figures = {
        "before": round(math.exp(before), 4),
        "after": round(math.exp(after), 4),
        "ratio": round(ratio, 4),
        "top1_agreement": round(agreed / len(losses), 4),
        "tokens": len(losses),
    }
    reason = f"the writer's perplexity is {ratio:.2f} times PyTorch's, allowed are {_MOST_RATIO}"
    # Written so that a ratio that is not a number fails too.
    return check([] if ratio <= _MOST_RATIO else [reason], figures)
