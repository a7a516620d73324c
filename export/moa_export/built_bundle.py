"""Bundles of the built-in target and a shipped drafter, made without torch.

``moa-export`` makes the same graphs and compares them with PyTorch. What it found stands beside a drafter's weights,
with the digests of the files: a bundle with the same files is proven too, and its manifest says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moa_decoder.rounded_weights import RoundedWeights
from moa_drafter.config import check_fit
from moa_drafter.drafter_weights import read_weights
from moa_drafter.pretrained import checkpoint_of
from moa_drafter.target_facts import facts_of
from moa_drafter.target_folder import weights_of
from moa_drafter.target_source import BUILTIN, DEFAULT_TARGET, resolve_target, shown_name
from moa_export.bundle_readme import write_readme
from moa_export.bundle_writer import staged_bundle
from moa_export.device_parts import DeviceParts
from moa_export.golden_step import worked_example
from moa_export.graph_files import (
    TARGET,
    WEB_WRITER,
    WRITER,
    not_checked,
    usual_bits,
    write_half,
    write_web_half,
    write_web_writer,
    write_writer,
    writer_details,
)
from moa_export.plain_bundle import write_drafter_texts
from moa_export.progress import Advance, Progress
from moa_export.recipe import Recipe
from moa_runtime.backends.onnx import OnnxBackend
from moa_runtime.bundle import write_manifest
from moa_runtime.manifest import Manifest, TargetEntry
from moa_runtime.offline_stopping import StoppingRule

#: Beside a shipped drafter's weights: digests, checks and stopping rule of the bundle that was proven.
PROOF_FILE = "proof.json"
_MB = 10**6
_FETCH, _READ, _WRITE = "fetching the model, MB", "reading the model", "writing the bundle"
_HALF, _WRITER = "{}: the drafter", "{}: the offline writer"
_WAYS = {"onnx": (write_half, WRITER, write_writer), "web": (write_web_half, WEB_WRITER, write_web_writer)}


def usual_seconds(targets: Sequence[str]) -> dict[str, float]:
    """Return the stages of :func:`build_bundle` in order, and the seconds that each takes on two idle cores."""
    made = {way.format(name): seconds for way, seconds in ((_HALF, 1.0), (_WRITER, 1.0)) for name in targets}
    return {_FETCH: 5.0, _READ: 1.0, **made, _WRITE: 1.0}


def build_bundle(
    out: Path,
    progress: Progress,
    targets: Sequence[str] = ("onnx",),
    drafter: str | Path | None = None,
    *,
    model: str = DEFAULT_TARGET,
) -> Manifest:
    """Write a bundle by the default recipe to ``out``, which must not exist; return its manifest.

    Args:
        targets: of ``onnx`` and ``web``.
        drafter: see :func:`moa_drafter.pretrained.checkpoint_of`.
        model: of a family that :mod:`moa_decoder` describes.

    Raises:
        MoaError: no source has the target, the two do not fit together, or ``out`` cannot be written.
    """
    recipe, checkpoint = Recipe(), checkpoint_of(drafter)
    with staged_bundle(out, force=False) as stage:
        with progress.stage(_FETCH, BUILTIN[model].size // _MB if model in BUILTIN else 1) as advance:
            folder = resolve_target(model, _counting(advance))
        with progress.stage(_READ):
            facts, weights = facts_of(folder), read_weights(checkpoint)
            check_fit(weights.config, facts)
            context, made_of = facts.config.max_position_embeddings, (checkpoint, weights.config, recipe)
            manifest = write_drafter_texts(stage, facts, shown_name(model), context, *made_of)
            parts = DeviceParts.of(weights.config, weights, weights_of(facts.folder, 32))
        halves: dict[str, TargetEntry] = {}
        for name in targets:
            with progress.stage(_HALF.format(name)):
                halves[name] = replace(_WAYS[name][0](parts, recipe, stage), checks=not_checked("parity", "tau"))
        del parts
        own = weights_of(facts.folder)
        bits, writers = usual_bits(own), dict[str, TargetEntry]()
        for name in targets:
            with progress.stage(_WRITER.format(name)):
                _, label, write = _WAYS[name]
                entry = write(RoundedWeights(own, bits), stage)
                details = writer_details(entry, TARGET, bits, facts.config)
                writers[label] = replace(entry, details=details, checks=not_checked("perplexity"))
        with progress.stage(_WRITE):
            graphs = {"targets": halves, "writer": writers.get(WRITER), "web_writer": writers.get(WEB_WRITER)}
            manifest = replace(manifest, **graphs)
            worked = {"onnx": worked_example(OnnxBackend(stage / halves["onnx"].file))} if "onnx" in halves else {}
            write_readme(stage, manifest, worked)
            manifest = write_manifest(stage, manifest)
            if (checkpoint / PROOF_FILE).is_file():
                proof = json.loads((checkpoint / PROOF_FILE).read_text(encoding="utf-8"))
                manifest = write_manifest(stage, with_proof(manifest, proof))
    return manifest


def _counting(advance: Advance) -> Callable[[int, int], None]:
    """Return what calls ``advance`` once for each megabyte of a download."""
    counted = 0

    def fetched(received: int, total: int) -> None:
        nonlocal counted
        while counted < received // _MB:
            advance()
            counted += 1

    return fetched


def proof_of(manifest: Manifest) -> dict[str, Any]:
    """Return what :func:`with_proof` reads, of a bundle that was proven."""
    entries = [*manifest.targets.values(), manifest.writer, manifest.web_writer]
    graphs = {
        entry.file: {"sha256": manifest.files[entry.file].sha256, "checks": entry.checks} for entry in entries if entry
    }
    return {"graphs": graphs, "manners": None if manifest.manners is None else vars(manifest.manners)}


def with_proof(manifest: Manifest, proof: Mapping[str, Any]) -> Manifest:
    """Return a manifest with the checks of those graphs that are the proven ones to the bit. With the device half's
    comes the stopping rule that was fitted to it."""

    def proven(entry: TargetEntry | None) -> TargetEntry | None:
        found = proof["graphs"].get(entry.file) if entry else None
        if entry is None or found is None or manifest.files[entry.file].sha256 != found["sha256"]:
            return entry
        return replace(entry, checks=found["checks"])

    targets = {name: proven(entry) for name, entry in manifest.targets.items()}
    rule = proof["manners"]
    fitted = rule is not None and targets != dict(manifest.targets)
    return replace(
        manifest,
        targets=targets,
        writer=proven(manifest.writer),
        web_writer=proven(manifest.web_writer),
        manners=StoppingRule(**rule) if fitted else manifest.manners,
    )
