"""Write drafter checkpoints, ``config.json`` and ``model.safetensors`` in one folder, and load them as modules."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from moa_drafter.architectures.registry import drafter_of
from moa_drafter.config import CONFIG_FILE, WEIGHTS_FILE, check_fit
from moa_drafter.drafter import Drafter
from moa_drafter.drafter_weights import read_weights
from moa_drafter.target import Target


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

    See :func:`moa_drafter.drafter_weights.read_weights` for its layouts and errors.
    """
    weights = read_weights(folder)
    drafter = drafter_of(weights.config)
    drafter.load_state_dict({name: torch.from_numpy(weights.array(name)) for name in weights.names})
    return drafter.eval()


def load_bound(folder: Path, target: Target) -> Drafter:
    """Load a drafter as :func:`load_checkpoint` does and bind it, ready to draft. Raises FitError for another
    target."""
    drafter = load_checkpoint(folder)
    check_fit(drafter.config, target)
    drafter.bind_target(target.embedding, target.head, target.layers)
    drafter.sharpen()
    return drafter
