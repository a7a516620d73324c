"""Prove the graphs of an existing bundle again.

A module of its own, because it imports torch, which ``moa-export inspect`` does without.
"""

from __future__ import annotations

from moa_drafter.config import drafter_fingerprint
from moa_drafter.pretrained import checkpoint_of
from moa_drafter.target_source import DEFAULT_TARGET
from moa_export.errors import ExportError
from moa_export.offline_model import TARGET, prove_writers
from moa_export.pipeline import ExportSettings, load
from moa_export.progress import Progress
from moa_export.recipe import Recipe
from moa_export.recordings import record
from moa_export.targets import target_of
from moa_export.targets.base import Artifact, TargetOptions
from moa_export.validation import Proof, prove, reference_of
from moa_runtime.bundle import Bundle, TargetEntry


def prove_again(
    bundle: Bundle, *, model: str | None, drafter: str | None, writer: str | None, npm: bool, progress: Progress
) -> dict[str, Proof]:
    """Compare every graph of ``bundle`` with PyTorch, as the export did.

    Args:
        model, drafter, writer: what it was exported from; the defaults when omitted, for the writer the target.
        npm: whether npm may install onnxruntime-web.

    Returns:
        proofs by the graphs' names, those of the writers as ``writer`` and ``web writer``.

    Raises:
        ExportError: the bundle was made from another target or drafter.
        MoaError: one of them cannot be loaded.
    """
    names = tuple(bundle.manifest.targets)
    recipe = Recipe.from_description(bundle.manifest.recipe)
    settings = ExportSettings(names, checkpoint_of(drafter), model=model or DEFAULT_TARGET, recipe=recipe)
    with progress.stage("loading the drafter and the target"):
        module, target, _ = load(settings)
    made_from = bundle.manifest.fingerprints
    for kind, own, expected in (
        ("target", target.fingerprint, made_from.target),
        ("drafter", drafter_fingerprint(settings.drafter), made_from.drafter),
    ):
        if own != expected:
            raise ExportError(
                f"the bundle was made from the {kind} {expected}, this is {own}: give the one it was made from "
                f"with --{'model' if kind == 'target' else 'drafter'}"
            )
    with progress.stage("recording conversations of the target"):
        recordings = record(target, module, settings.questions)
    proofs = prove_writers(bundle, writer or TARGET, target, recordings, progress, npm=npm)
    reference = reference_of(module, recordings, recipe, target.stop_tokens, progress)
    del module, target  # a graph may need as much memory
    for name in names:
        # "executorch-vulkan" was made by the target "executorch".
        exporter = target_of(name.partition("-")[0])(recipe, TargetOptions(npm=npm))
        artifact = _artifact(name, bundle.manifest.targets[name])
        with progress.stage(f"{name}: comparing with PyTorch", 1 + len(reference.recordings)) as advance:
            proofs[name] = prove(exporter.runner(bundle.folder, artifact), reference, recipe.tolerance, advance)
    return proofs


def _artifact(name: str, entry: TargetEntry) -> Artifact:
    return Artifact(name, entry.file, entry.inputs, entry.outputs, entry.states, entry.details)
