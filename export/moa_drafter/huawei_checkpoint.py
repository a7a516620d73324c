"""Checkpoints in the layout of the paper's authors, such as ``huawei-noah/MOASpec-Llama-3-8B-Instruct``.

Names of tensors are ours. Two things differ. Their ``config.json`` is the target's or a ``moa_spec`` one, so most
dimensions are read off the tensors. And they concatenate the target's keys and values head by head (key 0, value
0, key 1, ...; github.com/huawei-noah/HEBO, MOASpec's training forward), we put all keys before all values: the layer
self-attention's width is permuted here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moa_drafter.config import ConfigError, DrafterConfig, LayerDims

_TYPES = ("moa_spec", "llama")
#: Tensors of the layer self-attention by the axis that runs over its width.
_WIDTH_AXIS = {
    "layer_self_attention.self_attn.q_proj.weight": 1,
    "layer_self_attention.self_attn.k_proj.weight": 1,
    "layer_self_attention.self_attn.v_proj.weight": 1,
    "layer_self_attention.self_attn.o_proj.weight": 0,
    "layer_self_attention.mlp.gate_proj.weight": 1,
    "layer_self_attention.mlp.up_proj.weight": 1,
    "layer_self_attention.mlp.down_proj.weight": 0,
    "layer_self_attention.input_layernorm.weight": 0,
    "layer_self_attention.post_attention_layernorm.weight": 0,
    "Ekv2E.weight": 1,
}


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of the authors' layout and not of ours."""
    return config.get("model_type") in _TYPES and "architecture" not in config


def published_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
    """The drafter's configuration, from ``config.json`` and the shapes of the tensors.

    Raises:
        ConfigError: something is in neither; the message names it.
    """
    if "Ekv2E.weight" not in shapes:
        raise ConfigError("the folder holds no drafter: its weights have no Ekv2E.weight")
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
        raise ConfigError(f"the published checkpoint does not say {name}{hint}") from error
    except ConfigError:
        raise
    except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError("the shapes of the published checkpoint's tensors are those of no drafter") from error


def keys_before_values(state: Mapping[str, Tensor], target_kv_heads: int) -> dict[str, Tensor]:
    """The same weights for an input in our order.

    Args:
        target_kv_heads: key-value heads of the target.
    """
    width = state["Ekv2E.weight"].shape[1]
    head_dim = width // (2 * target_kv_heads)
    # Where each number of ours stands among theirs.
    order = torch.arange(width).view(target_kv_heads, 2, head_dim).transpose(0, 1).flatten()
    return {
        name: tensor.index_select(_WIDTH_AXIS[name], order) if name in _WIDTH_AXIS else tensor
        for name, tensor in state.items()
    }


def _layer(name: str, shapes: Mapping[str, tuple[int, ...]], width: int, heads: int) -> LayerDims:
    head_dim = width // heads
    kv_heads = shapes[f"{name}.self_attn.k_proj.weight"][0] // head_dim
    return LayerDims(width, heads, kv_heads, head_dim, shapes[f"{name}.mlp.gate_proj.weight"][0])
