"""The offline writer of a bundle: a whole model that the device writes with while it has no verifier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moa_decoder.errors import TargetError
from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.target import Target, load_target
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import shown_name
from moa_export.errors import ExportError
from moa_export.graph_files import (
    NOT_ASKED,
    TARGET,
    WEB_WRITER,
    WRITER,
    usual_bits,
    write_web_writer,
    write_writer,
    writer_bits,
    writer_details,
)
from moa_export.progress import Advance, Progress
from moa_export.recordings import Recording
from moa_export.targets.base import StandIn
from moa_export.targets.web import web_runner
from moa_export.validation import Check, Made, Proof, check, proof_of, unproved
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.load import writer_backend
from moa_runtime.bundle import Bundle
from moa_runtime.manifest import TargetEntry

#: Most parameters of a target that is its own writer; a larger one needs a small sibling.
LARGEST = 500_000_000
#: Answers that Core ML's writer is compared on: without a Mac a token takes a second.
_COMPUTED_WITH_NUMPY = 1
#: Names of the graphs in messages: for ExecuTorch, for Core ML.
EXECUTORCH_WRITER, COREML_WRITER = "executorch writer", "coreml writer"
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
    *,
    engines: Collection[str] = (),
    npm: bool = False,
) -> tuple[dict[str, Made], str]:
    """Write the graphs into ``folder``, and compare their perplexity of the target's answers with PyTorch's.

    Args:
        recordings: the answers; none, and nothing is compared, and 4 bits are never found too few.
        engines: each that is no onnxruntime (``web``, ``executorch``, ``coreml``) gets a graph of its own besides.
        npm: whether npm may install onnxruntime-web.

    Returns:
        graphs by their names in messages, and a note for the user, or the empty string. No graphs where none is wanted,
        or where the user named none and the target loses too much or cannot be built; those of a model that the user
        named may have failed their proof.

    Raises:
        MoaError: a model that cannot be loaded or built, or one with another tokenizer.
    """
    model, note = model_of(settings, target)
    if model == NONE:
        return {}, note
    source, losses = _source(model, target, recordings, progress)

    def make(name: str, bits: int) -> Made:
        began = time.monotonic()
        with progress.stage(f"offline {name}: exporting in {bits} bits"):
            entry = _exporter(name)(RoundedWeights(weights, bits), folder)
        proof = _prove(name, partial(_runner, name, folder, entry, npm=npm), recordings, losses, progress)
        details = writer_details(entry, shown_name(model), bits, source.config)
        return Made(replace(entry, details=details, checks=proof.checks), proof, time.monotonic() - began)

    missing = "the bundle has no offline writer: {} (--offline-model names another model, or none)"
    try:
        weights = weights_of(source.folder)
        most = writer_bits(weights)
        bits = settings.bits or usual_bits(weights)
        made = make(WRITER, bits)
    except (TargetError, ExportError) as error:
        if settings.model is not None:
            text = f"{settings.model} cannot be the offline writer: {error}; name another with --offline-model, or none"
            raise ExportError(text, code=error.code) from error
        return {}, missing.format(error)
    if made.proof.failures and settings.bits is None and bits < min(most, 8):
        lost, bits = made.proof.failures[0], 8
        made = make(WRITER, bits)
        if not made.proof.failures:
            note = f"the offline writer has 8 bits, for with fewer {lost}"
    if made.proof.failures and settings.model is None and settings.bits is None:
        (folder / made.entry.file).unlink()
        return {}, missing.format(made.proof.failures[0])
    own = {"web": WEB_WRITER, "executorch": EXECUTORCH_WRITER, "coreml": COREML_WRITER}
    others: dict[str, Made] = {}
    for name in (name for engine, name in own.items() if engine in engines):
        try:
            others[name] = make(name, bits)
        except ExportError as error:
            note = note or f"the bundle has no {name}: {error}"
    return {WRITER: made, **others}, note


def prove_writers(
    bundle: Bundle, model: str, target: Target, recordings: Sequence[Recording], progress: Progress, *, npm: bool
) -> dict[str, Proof]:
    """Compare a bundle's writers with PyTorch, as the export did. Returns proofs by the names of messages.

    Raises:
        MoaError: see :func:`make_writer`.
    """
    found = {name.replace("_", " "): entry for name, entry in bundle.manifest.writers.items()}
    if not found:
        return {}
    _, losses = _source(model, target, recordings, progress)
    return {
        name: _prove(name, partial(_runner, name, bundle.folder, entry, npm=npm), recordings, losses, progress)
        for name, entry in found.items()
    }


def _exporter(name: str) -> Callable[[RoundedWeights, Path], TargetEntry]:
    if name == EXECUTORCH_WRITER:
        from moa_export.targets.executorch_writer import export_executorch_writer  # its package is an extra

        return export_executorch_writer
    if name == COREML_WRITER:
        from moa_export.targets.coreml_writer import export_coreml_writer  # the same

        return export_coreml_writer
    return write_web_writer if name == WEB_WRITER else write_writer


def _runner(name: str, folder: Path, entry: TargetEntry, *, npm: bool) -> Backend | StandIn:
    if name == EXECUTORCH_WRITER:
        from moa_export.targets.executorch_writer_backend import ExecutorchWriter

        return ExecutorchWriter(folder / entry.file, entry)
    if name == COREML_WRITER:
        from moa_export.targets.coreml_writer import coreml_writer_backend

        return StandIn(coreml_writer_backend(folder, entry), "Core ML was not run: the package was computed with numpy")
    return web_runner(folder, entry, npm=npm) if name == WEB_WRITER else writer_backend(folder, entry)


def _source(
    model: str, target: Target, recordings: Sequence[Recording], progress: Progress
) -> tuple[Target, list[Sequence[float]]]:
    """Load the model; return it with its losses in PyTorch (nats) at each recording's tokens. Raises MoaError."""
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
    name: str,
    runner: Callable[[], Backend | StandIn],
    recordings: Sequence[Recording],
    losses: Sequence[Sequence[float]],
    progress: Progress,
) -> Proof:
    if not recordings:
        return unproved(NOT_ASKED, "perplexity")
    if name == COREML_WRITER:
        recordings = recordings[:_COMPUTED_WITH_NUMPY]
    with progress.stage("offline writer: comparing with PyTorch", len(recordings)) as advance:
        before = float(np.mean([loss for some in losses[: len(recordings)] for loss in some]))
        return proof_of(runner(), lambda backend: {"perplexity": check_of(backend, recordings, before, advance)})


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
