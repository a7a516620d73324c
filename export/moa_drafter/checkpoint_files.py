"""The files of a checkpoint, and its identity. Needs no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moa_runtime.errors import MoaError

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
#: Where a training run keeps its checkpoint.
CHECKPOINT_FOLDER = "drafter"


class CheckpointError(MoaError):
    """A drafter checkpoint that cannot be found or loaded; the message names the folder, file or tensor."""


def drafter_fingerprint(folder: Path) -> str:
    """Identity of a checkpoint: SHA-256 over its configuration and weights."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:32]
