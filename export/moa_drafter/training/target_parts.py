"""Parts of a target's layer, whatever its family, that a drafter's layer can begin as."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moa_drafter.config import LayerDims
from moa_drafter.llama import DecoderLayer

_log = logging.getLogger(__name__)

_ATTENTION, _MLP = "self_attn", "mlp"
#: Names of a family's matrices for ours; Llama's are the first ones.
_NAMES = {
    "self_attn.q_proj": ("self_attn.q_proj",),
    "self_attn.k_proj": ("self_attn.k_proj",),
    "self_attn.v_proj": ("self_attn.v_proj",),
    "self_attn.o_proj": ("self_attn.o_proj", "self_attn.dense", "self_attn.out_proj"),
    "mlp.gate_proj": ("mlp.gate_proj", "feed_forward.gate_proj", "feed_forward.w1"),
    "mlp.up_proj": ("mlp.up_proj", "feed_forward.up_proj", "feed_forward.w3"),
    "mlp.down_proj": ("mlp.down_proj", "feed_forward.down_proj", "feed_forward.w2", "shared_mlp.output_linear"),
}
#: Matrices that hold several of ours, one below the other.
_QUERIES_KEYS_VALUES = ("self_attn.qkv_proj",)
_GATE_UP = ("mlp.gate_up_proj", "shared_mlp.input_linear")
_LAST_NORMS = ("norm", "embedding_norm", "final_layernorm", "final_norm")


@torch.no_grad()
def start_layer(ours: DecoderLayer, theirs: nn.Module) -> None:
    """Let a layer begin as a layer of the target, as far as that has the parts in these sizes.

    Other matrices keep their random weights, and their half (attention or feed-forward) adds nothing at first: its last
    matrix is zero. A warning names them.
    """
    dims, found = ours.self_attn.dims, _matrices(theirs.state_dict(), ours.self_attn.dims)
    missing = []
    for name in _NAMES:
        matrix = ours.get_submodule(name).weight
        if name in found and found[name].shape == matrix.shape:
            matrix.copy_(found[name])
        else:
            missing.append(name)
    for part, last in ((_ATTENTION, ours.self_attn.o_proj), (_MLP, ours.mlp.down_proj)):
        if any(name.startswith(part) for name in missing):
            last.weight.zero_()
    before_attention, before_mlp = _norms(theirs)
    ours.input_layernorm.weight.copy_(norm_weight(before_attention, dims.hidden_size))
    ours.post_attention_layernorm.weight.copy_(norm_weight(before_mlp, dims.hidden_size))
    if missing:
        _log.warning(
            "a layer of the drafter begins with random weights for %s: the target's %s has none of that form",
            ", ".join(missing),
            type(theirs).__name__,
        )


def start_norm(ours: nn.Module, model: Any) -> None:
    """Let a norm begin as the norm before a target's head; ``model`` are transformers' layers and norms."""
    norm = next((getattr(model, name) for name in _LAST_NORMS if hasattr(model, name)), None)
    with torch.no_grad():
        ours.weight.copy_(norm_weight(norm, len(ours.weight)))


@torch.no_grad()
def norm_weight(norm: nn.Module | None, size: int) -> Tensor:
    """Return the factors ``[size]`` of a norm, ones for none.

    They are its weights, or those and 1 (Gemma), as computed for a vector whose mean is 0 and whose mean square is 1.
    """
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return torch.ones(size)
    x = torch.ones(1, size, dtype=weight.dtype, device=weight.device)
    x[:, 1::2] = -1
    factors: Tensor = ((norm(x) - norm(-x)) / 2 * x)[0]
    # An epsilon makes the factors a little smaller than the weights.
    return next((exact for exact in (weight, 1 + weight) if torch.allclose(factors, exact, rtol=1e-2)), factors)


def _matrices(state: Mapping[str, Tensor], dims: LayerDims) -> dict[str, Tensor]:
    """Return a layer's matrices by our names."""

    def first(names: tuple[str, ...]) -> Tensor | None:
        return next((state[f"{name}.weight"] for name in names if f"{name}.weight" in state), None)

    found = {ours: matrix for ours, names in _NAMES.items() if (matrix := first(names)) is not None}
    queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    for fused, names, sizes in (
        (first(_QUERIES_KEYS_VALUES), "q k v", (queries, keys, keys)),
        (first(_GATE_UP), "gate up", (dims.intermediate_size,) * 2),
    ):
        if fused is not None and len(fused) == sum(sizes):
            part = _ATTENTION if len(sizes) == 3 else _MLP
            found |= {f"{part}.{name}_proj": each for name, each in zip(names.split(), fused.split(sizes), strict=True)}
    return found


def _norms(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return a layer's norms before attention and before feed-forward, None for none.

    ``post_attention_layernorm`` is the latter in Llama; with one after feed-forward it comes after attention.
    """
    own = dict(layer.named_children())
    first = own.get("input_layernorm") or own.get("operator_norm")
    if "post_feedforward_layernorm" in own:
        return first, own.get("pre_feedforward_layernorm")
    return first, own.get("post_attention_layernorm") or own.get("ffn_norm") or first  # one norm for parallel halves
