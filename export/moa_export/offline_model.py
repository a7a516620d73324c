"""The offline writer of a bundle: a whole model that the device writes with while it has no verifier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
    web: bool = False,
    npm: bool = False,
) -> tuple[dict[str, Made], str]:
    """Write the graphs into ``folder``, and compare their perplexity of the target's answers with PyTorch's.

    Args:
        recordings: the answers; none, and nothing is compared, and 4 bits are never found too few.
        web: whether the model is written for onnxruntime-web too, and ``npm`` may install that.

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
    source, before = _source(model, target, recordings, progress)

    def make(name: str, bits: int) -> Made:
        began = time.monotonic()
        with progress.stage(f"offline {name}: exporting in {bits} bits"):
            export = write_web_writer if name == WEB_WRITER else write_writer
            entry = export(RoundedWeights(weights, bits), folder)
        proof = _prove(lambda: _runner(name, folder, entry, npm=npm), recordings, before, progress)
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
    return {WRITER: made, **({WEB_WRITER: make(WEB_WRITER, bits)} if web else {})}, note


def prove_writers(
    bundle: Bundle, model: str, target: Target, recordings: Sequence[Recording], progress: Progress, *, npm: bool
) -> dict[str, Proof]:
    """Compare a bundle's writers with PyTorch, as the export did. Returns proofs by the names of messages.

    Raises:
        MoaError: see :func:`make_writer`.
    """
    entries = {WRITER: bundle.manifest.writer, WEB_WRITER: bundle.manifest.web_writer}
    found = {name: entry for name, entry in entries.items() if entry is not None}
    if not found:
        return {}
    _, before = _source(model, target, recordings, progress)
    return {
        name: _prove(partial(_runner, name, bundle.folder, entry, npm=npm), recordings, before, progress)
        for name, entry in found.items()
    }


def _runner(name: str, folder: Path, entry: TargetEntry, *, npm: bool) -> Backend | StandIn:
    return web_runner(folder, entry, npm=npm) if name == WEB_WRITER else writer_backend(folder, entry)


def _source(model: str, target: Target, recordings: Sequence[Recording], progress: Progress) -> tuple[Target, float]:
    """Load the model; return it with its mean loss in PyTorch (nats a token). Raises MoaError."""
    with progress.stage("offline writer: loading"):
        source = target if model == TARGET else load_target(model)
        if source is not target and source.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ExportError(
                f"--offline-model {model} has another tokenizer than the target, which could not read its text: choose "
                "a model of the target's family, or none",
                code="other_tokenizer",
            )
        if not recordings:
            return source, 0.0
        if source is target:
            return source, float(np.mean([loss for recording in recordings for loss in recording.losses]))
        return source, loss_of(source, recordings)


def _prove(
    runner: Callable[[], Backend | StandIn], recordings: Sequence[Recording], before: float, progress: Progress
) -> Proof:
    if not recordings:
        return unproved(NOT_ASKED, "perplexity")
    with progress.stage("offline writer: comparing with PyTorch", len(recordings)) as advance:
        return proof_of(runner(), lambda backend: {"perplexity": check_of(backend, recordings, before, advance)})


@torch.no_grad()
def loss_of(source: Target, recordings: Sequence[Recording]) -> float:
    """Mean loss of a model at the recorded answers (nats a token), in PyTorch."""
    losses = []
    for recording in recordings:
        logits = source.model(torch.tensor([recording.tokens], device=source.device)).logits[
            0, recording.prompt - 1 : -1
        ]
        answer = torch.tensor(recording.tokens[recording.prompt :], device=source.device)
        losses += torch.nn.functional.cross_entropy(logits.float(), answer, reduction="none").tolist()
    return float(np.mean(losses))


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
