"""The offline writer of a bundle: a whole model that the device writes with while it has no verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moa_drafter.architectures.independent import IndependentConfig, IndependentDrafter
from moa_drafter.config import ConfigError, FitError, check_copied_exactly, config_for_target, longest_context
from moa_drafter.llama import run_layers
from moa_drafter.target import Target, deviation_from_transformers, load_target
from moa_export.errors import ExportError
from moa_export.progress import Advance, Progress
from moa_export.recordings import Recording
from moa_export.targets.base import Artifact, StandIn
from moa_export.targets.onnx import export_writer
from moa_export.targets.web import export_web_writer, web_runner
from moa_export.validation import FAILED, NOT_ASKED, PASSED, Check, Proof, in_place_of_the_engine, step_ms, unproved
from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import Bundle, TargetEntry
from moa_runtime.paths import expanded

#: A target of at most so many parameters writes for itself; a larger one needs a small sibling.
LARGEST = 500_000_000
#: Most that rounding may multiply the perplexity by.
_MOST_RATIO = 1.1
#: Tokens that a copy is tested with, and its largest error relative to the size of the target's logits.
_COPY_TOKENS = 12
_COPY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
TARGET, NONE = "target", "none"


@dataclass(frozen=True)
class WriterSettings:
    """Which model writes offline.

    Attributes:
        model: ``target``, ``none``, a name or a folder; None for the target where it is small enough and loses little,
            else none.
        bits: of its layers, 4 or 8; None for 4, or 8 where 4 lose too much.
        web: whether it is written for onnxruntime-web too.
        npm: whether npm may install that.

    Raises:
        ExportError: other bits.
    """

    model: str | None = None
    bits: int | None = None
    web: bool = False
    npm: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8):
            raise ExportError(f"--offline-bits must be 4 or 8, not {self.bits}")


@dataclass(frozen=True)
class MadeWriter:
    """The graph's entry for the manifest, and how it was proved."""

    entry: TargetEntry
    proof: Proof


@dataclass(frozen=True)
class Writers:
    """The writer for onnxruntime, and the same for onnxruntime-web where that is wanted; None for none."""

    plain: MadeWriter | None = None
    web: MadeWriter | None = None

    @property
    def made(self) -> dict[str, MadeWriter]:
        """By the names of messages."""
        both = {"writer": self.plain, "web writer": self.web}
        return {name: writer for name, writer in both.items() if writer is not None}


def model_of(settings: WriterSettings, target: Target) -> tuple[str, str]:
    """Which model writes, :data:`NONE` for none, and a note for the user, or the empty string."""
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
    settings: WriterSettings, target: Target, recordings: Sequence[Recording], folder: Path, progress: Progress
) -> tuple[Writers, str]:
    """Write the graphs into ``folder``, and compare their perplexity of the target's answers with PyTorch's.

    Args:
        recordings: the answers; none, and nothing is compared, and None for the bits is 4.

    Returns:
        what was made, and a note for the user, or the empty string. Nothing where none is wanted, or where the user
        named none and the target loses too much or cannot be copied; one that the user named may have failed its proof.

    Raises:
        MoaError: a model that cannot be loaded or copied, or one with another tokenizer.
    """
    model, note = model_of(settings, target)
    if model == NONE:
        return Writers(), note
    making = _Making(model, *_source(model, target, recordings, progress), recordings, folder, progress)
    try:
        made = making.plain(settings.bits or 4)
    except (ConfigError, FitError) as error:
        if settings.model is not None:
            raise
        return Writers(), f"the bundle has no offline writer: {error} (--offline-model names another model)"
    if made.proof.failures and settings.bits is None:
        lost = made.proof.failures[0]
        made = making.plain(8)
        if not made.proof.failures:
            note = f"the offline writer has 8 bits, for with fewer {lost}"
    if not made.proof.failures or settings.model is not None or settings.bits is not None:
        return Writers(made, making.web(made.entry.details["bits"], npm=settings.npm) if settings.web else None), note
    (folder / made.entry.file).unlink()
    return (
        Writers(),
        f"the bundle has no offline writer: {made.proof.failures[0]} (--offline-model names another model)",
    )


@dataclass(frozen=True)
class _Making:
    """From a model to a proved graph; ``before`` is its mean loss in PyTorch (nats).

    Raises:
        MoaError: from its methods: a model that cannot be copied.
    """

    model: str
    source: Target
    before: float
    recordings: Sequence[Recording]
    folder: Path
    progress: Progress

    def plain(self, bits: int) -> MadeWriter:
        with self.progress.stage(f"offline writer: exporting in {bits} bits"):
            artifact = export_writer(whole_model(self.source), bits, self.folder)
        return self._made(artifact, bits, lambda: OnnxBackend(self.folder / artifact.file))

    def web(self, bits: int, *, npm: bool) -> MadeWriter:
        with self.progress.stage(f"offline writer: exporting in {bits} bits for browsers"):
            artifact = export_web_writer(whole_model(self.source), bits, self.folder)
        return self._made(artifact, bits, lambda: web_runner(self.folder, artifact, npm=npm))

    def _made(self, artifact: Artifact, bits: int, runner: Callable[[], Backend | StandIn]) -> MadeWriter:
        proof = _prove(runner, self.recordings, self.before, self.progress)
        name = Path(self.model).name if expanded(self.model).is_dir() else self.model
        longest, _ = longest_context(self.source.config)
        details = {"model": name, "bits": bits, "max_context": longest, **artifact.details}
        size = (self.folder / artifact.file).stat().st_size
        entry = TargetEntry(
            artifact.file, size, artifact.inputs, artifact.outputs, details=details, checks=proof.checks
        )
        return MadeWriter(entry, proof)


def prove_writers(
    bundle: Bundle, model: str, target: Target, recordings: Sequence[Recording], progress: Progress, *, npm: bool
) -> dict[str, Proof]:
    """Compare a bundle's writers with PyTorch, as the export did. Returns proofs by the names of messages.

    Raises:
        MoaError: see :func:`make_writer`.
    """
    manifest, folder = bundle.manifest, bundle.folder
    plain, web = manifest.writer, manifest.web_writer
    proofs: dict[str, Proof] = {}
    if plain is None and web is None:
        return proofs
    _, before = _source(model, target, recordings, progress)
    if plain is not None:
        proofs["writer"] = _prove(lambda: OnnxBackend(folder / plain.file), recordings, before, progress)
    if web is not None:
        artifact = Artifact("writer", web.file, web.inputs, web.outputs, details=web.details)
        proofs["web writer"] = _prove(lambda: web_runner(folder, artifact, npm=npm), recordings, before, progress)
    return proofs


def _source(model: str, target: Target, recordings: Sequence[Recording], progress: Progress) -> tuple[Target, float]:
    """The model, and its mean loss in PyTorch (nats a token). Raises MoaError."""
    with progress.stage("offline writer: loading"):
        source = target if model == TARGET else load_target(model)
        if source is not target and source.tokenizer.get_vocab() != target.tokenizer.get_vocab():
            raise ExportError(
                f"--offline-model {model} has another tokenizer than the target, who could not read its text: choose a "
                "model of the target's family, or none"
            )
        return source, loss_of(source, recordings) if recordings else 0.0


def _prove(
    runner: Callable[[], Backend | StandIn], recordings: Sequence[Recording], before: float, progress: Progress
) -> Proof:
    if not recordings:
        return unproved(NOT_ASKED, "perplexity")
    with progress.stage("offline writer: comparing with PyTorch", len(recordings)) as advance:
        running = runner()
        backend = running.backend if isinstance(running, StandIn) else running
        proof = Proof({"perplexity": check_of(backend, recordings, before, advance)}, step_ms(backend))
        return in_place_of_the_engine(proof, running) if isinstance(running, StandIn) else proof


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
    if ratio <= _MOST_RATIO:
        return {"status": PASSED, **figures}
    reason = f"the writer's perplexity is {ratio:.2f} times PyTorch's, allowed are {_MOST_RATIO}"
    return {"status": FAILED, "reason": reason, **figures}


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
            raise FitError(f"a layer of {target.folder.name} has {unknown[0]}, which a copy could not compute with")
    model.bind_target(target.embedding, target.head)
    model.initialise(target)
    model.eval()
    error = deviation_from_transformers(target, _COPY_TOKENS, lambda text, start: _computed(model, text, start))
    if error > _COPY_TOLERANCE[target.model.dtype]:
        raise FitError(f"a copy of {target.folder.name} would compute something else: its logits differ by {error:.2g}")
    return model


def _computed(model: IndependentDrafter, text: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    """Return normed last hidden states and logits of ``text`` from position ``start`` on."""
    angles = model.angles(torch.arange(start, start + len(text)))
    causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    hidden = model.norm(run_layers(model.device_layers, model.embed(torch.tensor(text)), angles, causal)[0])
    return hidden, model.logits(hidden)
