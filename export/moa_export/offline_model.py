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
from torch import Tensor

from moa_drafter.architectures.independent import IndependentDrafter
from moa_drafter.config import (
    ConfigError,
    FitError,
    IndependentConfig,
    check_copied_exactly,
    config_for_target,
    longest_context,
)
from moa_drafter.llama import run_layers
from moa_drafter.target import Target, deviation_from_transformers, load_target
from moa_export.errors import ExportError
from moa_export.progress import Advance, Progress
from moa_export.recordings import Recording
from moa_export.targets.base import StandIn
from moa_export.targets.onnx import export_writer
from moa_export.targets.web import export_web_writer, web_runner
from moa_export.validation import NOT_ASKED, Check, Made, Proof, check, proof_of, unproved
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle, TargetEntry
from moa_runtime.paths import expanded

#: Most parameters of a target that is its own writer; a larger one needs a small sibling.
LARGEST = 500_000_000
#: Most that rounding may multiply the perplexity by.
_MOST_RATIO = 1.1
#: Tokens that a copy is tested with, and its largest error relative to the size of the target's logits.
_COPY_TOKENS = 12
_COPY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
TARGET, NONE = "target", "none"
#: Names of the graphs in messages: for onnxruntime, and for onnxruntime-web.
WRITER, WEB_WRITER = "writer", "web writer"


@dataclass(frozen=True)
class WriterSettings:
    """Which model writes offline.

    Attributes:
        model: ``target``, ``none``, a name or a folder; None for the target if it is small enough and loses little,
            else none.
        bits: of its layers, 4 or 8; None for 4, or for 8 if 4 lose too much.

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
        recordings: the answers; none, and nothing is compared, and None for the bits is 4.
        web: whether the model is written for onnxruntime-web too, and ``npm`` may install that.

    Returns:
        graphs by their names in messages, and a note for the user, or the empty string. No graphs where none is wanted,
        or where the user named none and the target loses too much or cannot be copied; those of a model that the user
        named may have failed their proof.

    Raises:
        MoaError: a model that cannot be loaded or copied, or one with another tokenizer.
    """
    model, note = model_of(settings, target)
    if model == NONE:
        return {}, note
    source, before = _source(model, target, recordings, progress)

    def make(name: str, bits: int) -> Made:
        began = time.monotonic()
        with progress.stage(f"offline {name}: exporting in {bits} bits"):
            entry = (export_web_writer if name == WEB_WRITER else export_writer)(whole_model(source), bits, folder)
        proof = _prove(lambda: _runner(name, folder, entry, npm=npm), recordings, before, progress)
        shown = Path(model).name if expanded(model).is_dir() else model
        longest, _ = longest_context(source.config)
        details = {"model": shown, "bits": bits, "max_context": longest, **entry.details}
        return Made(replace(entry, details=details, checks=proof.checks), proof, time.monotonic() - began)

    missing = "the bundle has no offline writer: {} (--offline-model names another model)"
    bits = settings.bits or 4
    try:
        made = make(WRITER, bits)
    except (ConfigError, FitError) as error:
        if settings.model is not None:
            raise
        return {}, missing.format(error)
    if made.proof.failures and settings.bits is None:
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
    return web_runner(folder, entry, npm=npm) if name == WEB_WRITER else OnnxBackend(folder / entry.file)


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
        return source, loss_of(source, recordings) if recordings else 0.0


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


@torch.no_grad()
def whole_model(target: Target) -> IndependentDrafter:
    """Copy all of a target's layers between its embedding and its head, in float32.

    Raises:
        ConfigError, FitError: the target has layers that ours cannot represent.
    """
    check_copied_exactly(target.model.config)
    config = config_for_target(target.model.config, draft_vocab_size=len(target.head))
    model = IndependentDrafter(IndependentConfig.like(config, layers=len(target.layers)))
    for ours, theirs in zip(model.device_layers, target.layers, strict=True):
        if unknown := sorted(theirs.state_dict().keys() - ours.state_dict().keys()):
            reason = f"a layer of {target.folder.name} has {unknown[0]}, which a copy could not compute with"
            raise FitError(reason, code="unsupported_model")
    model.bind_target(target.embedding, target.head)
    model.initialise(target)
    model.eval()
    error = deviation_from_transformers(target, _COPY_TOKENS, lambda text, start: _computed(model, text, start))
    if error > _COPY_TOLERANCE[target.model.dtype]:
        reason = f"a copy of {target.folder.name} would compute something else: its logits differ by {error:.2g}"
        raise FitError(reason, code="unsupported_model")
    return model


def _computed(model: IndependentDrafter, text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    """Return normed last hidden states and logits of ``text`` from position ``start`` on."""
    angles = model.angles(torch.arange(start, start + len(text)))
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    hidden = model.norm(run_layers(model.device_layers, model.embed(torch.tensor(text)), angles, causal)[0])
    return hidden, model.logits(hidden)
