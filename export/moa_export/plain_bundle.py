"""What every bundle holds of a target: tokenizer, chat template and limits. With those alone any client can chat.

Needs no torch for the families that :mod:`moa_decoder.families` describes.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Protocol

from moa_decoder.errors import TargetError
from moa_drafter.catalogue import drafter_advice
from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig, drafter_fingerprint, longest_context
from moa_drafter.target_facts import TargetFacts, facts_of, parameters_of
from moa_drafter.target_source import resolve_target, shown_name
from moa_drafter.transformers_config import UNDESCRIBED
from moa_export.bundle_readme import write_readme
from moa_export.bundle_writer import only_maker, staged_bundle
from moa_export.errors import ExportError
from moa_export.licences import write_licences
from moa_export.progress import Progress
from moa_export.recipe import Recipe
from moa_runtime.bundle import Bundle, tokenizer_fingerprint, write_manifest
from moa_runtime.manifest import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    BundleError,
    Fingerprints,
    Manifest,
    RecommendedSampling,
)
from moa_runtime.optional_deps import installed_versions
from moa_runtime.paths import cache_dir, check_cache

DeviceConfig = DrafterConfig | TokenConfig | Eagle3Config
_TOOLS = ("moa-edge", "torch", "onnx", "onnxruntime", "executorch", "torchao", "coremltools")


class TargetTexts(Protocol):
    """A target: :class:`moa_drafter.target_facts.TargetFacts`, or one that is loaded."""

    folder: Path
    fingerprint: str
    stop_tokens: tuple[int, ...]

    @property
    def chat_template(self) -> str: ...

    @property
    def special_tokens(self) -> dict[str, str]: ...

    @property
    def recommended_sampling(self) -> RecommendedSampling | None: ...


def note_of(model: str, architecture: str) -> str:
    """Return what a user of such a bundle should know."""
    streams = "copies what was said before, streams the rest" if architecture == "sssd" else "streams"
    return f"without a drafter a device {streams}, and writes nothing without the verifier; {drafter_advice(model)}"


def plain_facts(model: str) -> TargetFacts:
    """Read what a bundle says of a target. Raises TargetError."""
    folder = resolve_target(model)
    try:
        return facts_of(folder)
    except TargetError as error:
        if error.code not in UNDESCRIBED or importlib.util.find_spec("torch") is None:
            raise
    from moa_drafter.target import target_facts  # it asks transformers

    return target_facts(str(folder))


def write_texts(stage: Path, target: TargetFacts, name: str, architecture: str) -> Manifest:
    """Write tokenizer and template into ``stage``; return the manifest of a bundle without a graph, not written yet.

    Args:
        name: of the target, for messages.
        architecture: one of :data:`moa_runtime.options.WITHOUT_GRAPH`.

    Raises:
        MoaError: the target has no tokenizer.json, or no chat template.
    """
    copy_texts(stage, target.folder, target.chat_template)
    return Manifest(
        fingerprints=Fingerprints(target.fingerprint, tokenizer_fingerprint(stage / TOKENIZER_FILE)),
        target=name,
        target_parameters=parameters_of(target.folder),
        architecture=architecture,
        **dict.fromkeys(("kv_heads", "head_dim", "top_k", "draft_vocab_size"), 0),
        vocab_size=int(target.config.vocab_size),
        max_context=longest_context(target.config, windows=True)[0],
        stop_tokens=target.stop_tokens,
        special_tokens=target.special_tokens,
        recipe={},
        tools=installed_versions(("moa-edge",)),
        targets={},
        files={},
        sampling=target.recommended_sampling,
    )


def write_drafter_texts(
    stage: Path, target: TargetTexts, name: str, context: int, checkpoint: Path, config: DeviceConfig, recipe: Recipe
) -> Manifest:
    """Write tokenizer, template and licences into ``stage``; return the manifest of a bundle with a device half,
    without its graphs and not written yet.

    Args:
        name: of the target, for messages.
        context: positions that the target was made for.
        checkpoint: the drafter's folder.
        config: the drafter's.

    Raises:
        ExportError: the target has no tokenizer.json.
    """
    row_shape = (config.kv_heads, config.decoder.head_dim)
    if isinstance(config, Eagle3Config):
        row_shape = config.row_shape
    else:  # the length that a published head names bounds nothing
        context = min(config.max_position_embeddings, context)
    copy_texts(stage, target.folder, target.chat_template)
    write_licences(stage, "drafter", checkpoint)
    tokenizer = tokenizer_fingerprint(stage / TOKENIZER_FILE)
    return Manifest(
        fingerprints=Fingerprints(target.fingerprint, tokenizer, drafter_fingerprint(checkpoint)),
        target=name,
        target_parameters=parameters_of(target.folder),
        architecture=config.architecture,
        kv_heads=row_shape[0],
        head_dim=row_shape[1],
        top_k=min(recipe.top_k, config.draft_vocab_size),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        max_context=context,
        stop_tokens=target.stop_tokens,
        special_tokens=target.special_tokens,
        recipe=recipe.describe(),
        tools=installed_versions(_TOOLS),
        targets={},
        files={},
        sampling=target.recommended_sampling,
    )


def copy_texts(stage: Path, folder: Path, template: str) -> None:
    """Write tokenizer, licences and template of a target. Raises ExportError without a tokenizer.json."""
    source = folder / TOKENIZER_FILE
    if not source.is_file():
        reason = f"the target in {folder} has no {TOKENIZER_FILE}: save it with a fast tokenizer"
        raise ExportError(reason, code="file_missing")
    shutil.copyfile(source, stage / TOKENIZER_FILE)
    (stage / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    write_licences(stage, "target", folder)


def make_plain_bundle(
    out: Path, target: TargetFacts, name: str, architecture: str = "sssd", *, force: bool = False
) -> None:
    """Make a bundle without a graph in ``out``, in a second.

    Raises:
        MoaError: see :func:`write_texts` and :func:`moa_export.bundle_writer.staged_bundle`.
    """
    with staged_bundle(out, force=force) as stage:
        manifest = write_texts(stage, target, name, architecture)
        write_readme(stage, manifest, {})
        write_manifest(stage, manifest)


def cached_plain_bundle(model: str) -> Path:
    """Return the folder of a bundle without a graph for a target, in the cache, made or made anew if necessary.

    Raises:
        MoaError: see :func:`plain_facts` and :func:`make_plain_bundle`.
    """
    target = plain_facts(model)
    out = cache_dir() / "bundles" / f"plain-{target.fingerprint}"
    if _is_current(out, target):  # in a folder, too, in which nothing can be written
        return out
    check_cache()
    with only_maker(out, Progress(sys.stderr, quiet=True)):  # which takes a second
        if not _is_current(out, target):
            shutil.rmtree(out, ignore_errors=True)
            make_plain_bundle(out, target, shown_name(model))
    return out


def _is_current(folder: Path, target: TargetFacts) -> bool:
    """Return whether a folder holds a whole bundle with the target's texts, which its authors may change without the
    weights."""
    try:
        manifest = Bundle.open(folder).manifest
        template = (folder / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    except (BundleError, OSError):
        return False  # none, damaged, or of another version
    held = template, manifest.fingerprints.tokenizer
    held += manifest.stop_tokens, manifest.special_tokens, manifest.sampling
    wanted = target.chat_template, tokenizer_fingerprint(target.folder / TOKENIZER_FILE)
    wanted += target.stop_tokens, target.special_tokens, target.recommended_sampling
    return held == wanted
