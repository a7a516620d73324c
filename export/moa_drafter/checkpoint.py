"""Drafter checkpoints: ``config.json`` and ``model.safetensors`` in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moa_drafter.architectures.registry import drafter_of
from moa_drafter.config import CHECKPOINT_FOLDER, CONFIG_FILE, WEIGHTS_FILE, CheckpointError, ConfigError, check_fit
from moa_drafter.drafter import Drafter, TokenDrafter
from moa_drafter.huawei_checkpoint import is_published, keys_before_values, published_config
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_drafter.target_source import WEIGHTS_DIFFER, WeightFaults

#: What can be exported.
DeviceDrafter = MoADrafter | TokenDrafter


def save_checkpoint(drafter: Drafter, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write configuration and weights, the weights in ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor.to(torch.int32)).contiguous().cpu()
        for name, tensor in drafter.state_dict().items()
    }
    scratch = folder / f".{WEIGHTS_FILE}.tmp"
    save_file(state, scratch, metadata={"format": "pt"})
    scratch.replace(folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(drafter.config.to_json())


def load_checkpoint(folder: Path) -> Drafter:
    """Load a drafter of any architecture in float32; :meth:`Drafter.bind_target` must follow before it can draft.

    A folder in the layout of the paper's authors is taken too (:mod:`moa_drafter.huawei_checkpoint`).

    Raises:
        CheckpointError: a missing or truncated file, weights that nothing can be drafted with, or tensors that are
            missing, superfluous or of another shape, with the code ``weights_differ``.
    """
    try:
        published = _published_config(folder / CONFIG_FILE)
        if published is None:
            drafter = _read_config(folder)
            state = load_file(folder / WEIGHTS_FILE)
        else:
            state = load_file(folder / WEIGHTS_FILE)
            drafter = MoADrafter(published_config(published, {name: tuple(t.shape) for name, t in state.items()}))
            state["draft_to_target"] = torch.arange(drafter.config.vocab_size)
    except ConfigError as error:
        inside = folder / CHECKPOINT_FOLDER
        meant = (
            f"name the checkpoint of the run, {inside}" if inside.is_dir() else "expected a folder written by moa-train"
        )
        raise CheckpointError(f"{error}; {meant}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}: expected a folder written by moa-train") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {WEIGHTS_FILE} in {folder}: {error}; it may be truncated") from error
    if faults := WeightFaults.between(state, drafter.state_dict()):
        raise CheckpointError(
            f"the weights in {folder / WEIGHTS_FILE} are not those of its config.json: {faults}; take another "
            "checkpoint, or train one",
            code=WEIGHTS_DIFFER,
        )
    for name, tensor in state.items():
        if tensor.is_complex() or not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE}: {name!r} holds something else than finite real numbers: a training run that "
                "diverged writes such; take an earlier checkpoint, or train with a lower learning_rate"
            )
    if published is not None:
        # The target's key-value heads have the size of the decoder's own heads.
        heads = drafter.config.target_kv_size // (2 * drafter.config.decoder.head_dim)
        state = keys_before_values(state, heads)
    drafter.load_state_dict(state)
    low, high = drafter.draft_to_target.aminmax()
    if low < 0 or high >= drafter.config.vocab_size:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: draft_to_target must hold tokens from 0 to {drafter.config.vocab_size - 1}, not "
            f"{int(low if low < 0 else high)}: train the drafter again"
        )
    return drafter.eval()


def load_for_device(folder: Path) -> DeviceDrafter:
    """Load a drafter of an architecture that a device can run without PyTorch.

    Raises:
        CheckpointError: see :func:`load_checkpoint`; also an architecture that cannot be exported.
    """
    drafter = load_checkpoint(folder)
    if not isinstance(drafter, DeviceDrafter):
        raise CheckpointError(
            f"{folder} holds a drafter of the architecture {drafter.config.architecture}, which runs in PyTorch only: "
            "moa, early-exit and independent can be exported"
        )
    return drafter


def load_bound(folder: Path, target: Target) -> Drafter:
    """Load a drafter and bind it to its target, ready to draft.

    Raises:
        CheckpointError: see :func:`load_checkpoint`.
        FitError: the drafter was made for another shape of target.
    """
    drafter = load_checkpoint(folder)
    check_fit(drafter.config, target)
    drafter.bind_target(target.embedding, target.head, target.layers)
    drafter.sharpen()
    return drafter


def _read_config(folder: Path) -> Drafter:
    """The drafter that ``config.json`` describes. Raises ConfigError."""
    try:
        return drafter_of((folder / CONFIG_FILE).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the drafter's {CONFIG_FILE} in {folder}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the drafter's {CONFIG_FILE} in {folder}: it is no UTF-8 text") from error
    except ConfigError as error:
        raise ConfigError(f"cannot read the drafter's {CONFIG_FILE} in {folder}: {error}") from error


def _published_config(path: Path) -> dict[str, Any] | None:
    """What a ``config.json`` in the authors' layout says; None for one of ours, or one that cannot be read."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) and is_published(raw) else None
