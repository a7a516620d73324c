"""Drafter checkpoints: ``config.json`` and ``model.safetensors`` in one folder.

Checkpoints of the paper's authors, such as ``huawei-noah/MOASpec-Llama-3-8B-Instruct``, have the same tensor names. Two
things differ: their ``config.json`` is the target's or a ``moa_spec`` one, so most dimensions are read off the tensors;
and they concatenate the target's keys and values head by head (key 0, value 0, key 1, ...; github.com/huawei-noah/HEBO,
MOASpec's training forward). We put all keys before all values, so the layer self-attention's width is permuted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_drafter.architectures.registry import drafter_of
from moa_drafter.config import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    ConfigError,
    DrafterConfig,
    LayerDims,
    check_fit,
)
from moa_drafter.drafter import Drafter, TokenDrafter
from moa_drafter.model import MoADrafter
from moa_drafter.target import Target
from moa_runtime.errors import reason_of

#: Drafters that can be exported.
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

    A folder in the layout of the paper's authors is accepted too. Raises CheckpointError for missing or damaged files,
    weights that cannot draft, and (code ``weights_differ``) missing, superfluous or misshapen tensors.
    """
    weights = folder / WEIGHTS_FILE
    try:
        raw = _read_config(folder / CONFIG_FILE)
        published = is_published(raw)
        if published:
            state = load_file(weights)
            drafter = MoADrafter(published_config(raw, {name: tuple(t.shape) for name, t in state.items()}))
            state["draft_to_target"] = torch.arange(drafter.config.vocab_size)
        else:
            drafter = drafter_of(raw)
            state = load_file(weights)
    except ConfigError as error:
        inside = folder / CHECKPOINT_FOLDER
        advice = f"name the checkpoint of the run, {inside}" if inside.is_dir() else "expected one written by moa-train"
        raise CheckpointError(f"cannot load the drafter in {folder}: {error}; {advice}", code=error.code) from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}: expected a folder written by moa-train", code="file_missing"
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {weights}: {error}; it may be truncated", code="damaged") from error
    held, wanted = ({name: tuple(each.shape) for name, each in of.items()} for of in (state, drafter.state_dict()))
    if faults := WeightFaults.between(held, wanted):
        raise CheckpointError(
            f"the weights in {weights} are not those of its config.json: {faults}; take another, or train one",
            code=WEIGHTS_DIFFER,
        )
    for name, tensor in state.items():
        if tensor.is_complex() or not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{weights}: {name!r} holds something else than finite real numbers, as after a training run that "
                "diverged: take an earlier checkpoint, or train with a lower learning_rate",
                code="not_finite",
            )
    if published:
        # The target's key-value heads have the size of the decoder's own heads.
        heads = drafter.config.target_kv_size // (2 * drafter.config.decoder.head_dim)
        state = keys_before_values(state, heads)
    drafter.load_state_dict(state)
    low, high = drafter.draft_to_target.aminmax()
    if low < 0 or high >= drafter.config.vocab_size:
        raise CheckpointError(
            f"{weights}: draft_to_target must hold tokens from 0 to {drafter.config.vocab_size - 1}, not "
            f"{int(low if low < 0 else high)}: train the drafter again",
            code="out_of_range",
        )
    return drafter.eval()


def load_for_device(folder: Path) -> DeviceDrafter:
    """Load a drafter as :func:`load_checkpoint` does. Raises CheckpointError if a device cannot run it without
    PyTorch."""
    drafter = load_checkpoint(folder)
    if not isinstance(drafter, DeviceDrafter):
        raise CheckpointError(
            f"{folder} holds a drafter of the architecture {drafter.config.architecture}, which runs in PyTorch only: "
            "moa, early-exit and independent can be exported",
            code="not_exportable",
        )
    return drafter


def load_bound(folder: Path, target: Target) -> Drafter:
    """Load a drafter as :func:`load_checkpoint` does and bind it, ready to draft. Raises FitError for another
    target."""
    drafter = load_checkpoint(folder)
    check_fit(drafter.config, target)
    drafter.bind_target(target.embedding, target.head, target.layers)
    drafter.sharpen()
    return drafter


def _read_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json`` of either layout. Raises ConfigError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path.name}: {reason_of(error)}", code="unreadable") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no UTF-8 text", code="not_utf8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no JSON: {error}", code="not_json") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} is not a drafter configuration: expected one JSON object", code="wrong_type")
    return raw


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of the authors' layout, not ours."""
    return config.get("model_type") in ("moa_spec", "llama") and "architecture" not in config


def published_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
    """Make the configuration from ``config.json`` and the shapes of the tensors. Raises ConfigError if neither has a
    field."""
    if "Ekv2E.weight" not in shapes:
        raise ConfigError("its weights have no Ekv2E.weight", code="weights_differ")
    try:
        hidden, kv_size = shapes["Ekv2E.weight"]
        # A moa_spec configuration keeps the number of key-value heads under this name, and adds head_dim.
        heads = hidden // int(config["head_dim"]) if "head_dim" in config else int(config["num_attention_heads"])
        vocab_size = int(config["vocab_size"])
        layers = int(config["num_hidden_layers"] if config["model_type"] == "llama" else config["target_num_layers"])
        return DrafterConfig(
            target_num_layers=layers,
            target_kv_size=kv_size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            decoder=_layer("self_attention", shapes, hidden, heads),
            layer_attention=_layer("layer_self_attention", shapes, kv_size, heads),
            lsa_layers=tuple(range(layers)),
            rope_theta=float(config.get("rope_theta", 500000.0)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            max_position_embeddings=int(config.get("max_position_embeddings", 8192)),
            final_norm=False,
            layer_scale=False,
        )
    except KeyError as error:
        name = error.args[0]
        hint = ": add it, the number of the target's layers" if name == "target_num_layers" else ""
        raise ConfigError(f"the published checkpoint does not say {name}{hint}", code="missing_field") from error
    except ConfigError:
        raise
    except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            "the shapes of the published checkpoint's tensors are those of no drafter", code="weights_differ"
        ) from error


def keys_before_values(state: Mapping[str, Tensor], target_kv_heads: int) -> dict[str, Tensor]:
    """Return the weights for inputs with all keys before all values.

    Args:
        target_kv_heads: key-value heads of the target.
    """
    width = state["Ekv2E.weight"].shape[1]
    order = torch.arange(width).view(target_kv_heads, 2, -1).transpose(0, 1).flatten()

    def permuted(name: str, tensor: Tensor) -> Tensor:
        if not name.startswith(("layer_self_attention.", "Ekv2E.weight")):
            return tensor
        over_outputs = tensor.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight"))
        return tensor.index_select(0 if over_outputs else 1, order)

    return {name: permuted(name, tensor) for name, tensor in state.items()}


def _layer(name: str, shapes: Mapping[str, tuple[int, ...]], width: int, heads: int) -> LayerDims:
    head_dim = width // heads
    kv_heads = shapes[f"{name}.self_attn.k_proj.weight"][0] // head_dim
    return LayerDims(width, heads, kv_heads, head_dim, shapes[f"{name}.mlp.gate_proj.weight"][0])
