"""From a target and a drafter to a bundle that has been checked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa_drafter.checkpoint import drafter_fingerprint, load_checkpoint
from moa_drafter.fit import check_fit
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target, load_target
from moa_export.bundle_writer import rejected_path, staged_bundle
from moa_export.device_half import signature
from moa_export.errors import ExportError, ParityError
from moa_export.parity import TEXTS, Parity, compare, record
from moa_export.quiet import quiet_toolchain
from moa_export.recipe import Recipe
from moa_export.targets import target_of
from moa_export.targets.base import NotRun, TargetOptions
from moa_export.torch_backend import TorchBackend
from moa_runtime.bundle import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    Fingerprints,
    Manifest,
    TargetEntry,
    tokenizer_fingerprint,
    write_manifest,
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """What an export made.

    Attributes:
        bytes: the whole bundle.
        seconds: wall-clock time of the whole export.
        notes: what the user should know though it is no error.
    """

    bundle: Path
    bytes: int
    seconds: float
    parity: Parity
    notes: tuple[str, ...]


def export_bundle(
    out: Path,
    *,
    model: str,
    drafter_folder: Path,
    recipe: Recipe,
    force: bool = False,
    say: Say = lambda stage: None,
    texts: Sequence[tuple[str, str]] = TEXTS,
) -> Report:
    """Write a bundle for ``--target onnx`` to ``out`` and check it against PyTorch.

    Args:
        model: a target's name or folder.
        say: told the name of each stage as it begins.
        texts: user messages and answers for the parity check.

    Raises:
        MoaError: bad input; the message says what to do.
        ParityError: the graph strays beyond the recipe's tolerance; the files are in ``OUT.rejected``.
    """
    started = time.monotonic()
    with staged_bundle(out, force=force) as stage, quiet_toolchain():
        say("loading the drafter and the target")
        drafter = load_checkpoint(drafter_folder)
        target = load_target(model)
        note = check_fit(drafter.config, target)
        drafter.bind_target(target.embedding, target.head)
        say("exporting the device half")
        exporter = target_of("onnx")(recipe, TargetOptions())
        exporter.check(drafter.config)
        (artifact,) = exporter.export(drafter, stage)
        say("checking it against PyTorch")
        recordings = record(target, drafter, texts)
        runner = exporter.runner(stage, artifact)
        assert not isinstance(runner, NotRun)
        parity = compare(TorchBackend(drafter, top_k=recipe.top_k), runner, recordings)
        say("writing the bundle")
        _write_tokenizer(target, stage)
        fingerprints = Fingerprints(
            target=target.fingerprint,
            tokenizer=tokenizer_fingerprint(stage / TOKENIZER_FILE),
            drafter=drafter_fingerprint(drafter_folder),
        )
        entry = TargetEntry(artifact.file, (stage / artifact.file).stat().st_size, recipe.describe(), parity.to_dict())
        write_manifest(stage, _manifest(drafter, target, model, fingerprints, recipe, entry))
        size = sum(path.stat().st_size for path in stage.iterdir())
        if failures := parity.failures(recipe.tolerance):
            raise ParityError(
                f"the exported graph differs too much from PyTorch: {'; '.join(failures)}; "
                f"the files are in {rejected_path(out)}"
            )
    return Report(out, size, time.monotonic() - started, parity, (note,) if note else ())


def _write_tokenizer(target: Target, stage: Path) -> None:
    source = target.folder / TOKENIZER_FILE
    if not source.is_file():
        raise ExportError(f"the target in {target.folder} has no {TOKENIZER_FILE}: save it with a fast tokenizer")
    shutil.copyfile(source, stage / TOKENIZER_FILE)
    template = target.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ExportError(f"the target in {target.folder} has no chat template: moa-edge needs a chat model")
    (stage / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")


def _manifest(
    drafter: MoADrafter, target: Target, model: str, fingerprints: Fingerprints, recipe: Recipe, entry: TargetEntry
) -> Manifest:
    config = drafter.config
    inputs, outputs = signature(config, recipe.top_k)
    folder = Path(model).expanduser()
    special: dict[str, Any] = target.tokenizer.special_tokens_map
    return Manifest(
        fingerprints=fingerprints,
        # A folder's name, not its path, which would tell about the machine.
        target=folder.resolve().name if folder.is_dir() else model,
        inputs=inputs,
        outputs=outputs,
        kv_heads=config.decoder.num_kv_heads,
        head_dim=config.decoder.head_dim,
        top_k=min(recipe.top_k, config.draft_vocab_size),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        max_context=min(config.max_position_embeddings, target.model.config.max_position_embeddings),
        stop_tokens=target.stop_tokens,
        special_tokens={name: str(text) for name, text in special.items() if isinstance(text, str)},
        targets={"onnx": entry},
        files={},
    )
