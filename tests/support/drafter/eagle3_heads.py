"""Random EAGLE-3 heads in the formats in which heads are published, for the target of :mod:`support.tiny`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.tiny import DRAFT_VOCAB_SIZE, VOCAB_SIZE

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: Options of a head by a name for each: all that speculators has.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "qwen3": {"qwen3": True, "norm_before_residual": True},
    "llama3 rope": {"rope": LLAMA3},
    "own embedding": {"own_embedding": True},
    "whole vocabulary": {"draft_vocab": VOCAB_SIZE},
}


def head_tensors(
    *,
    seed: int = 3,
    qwen3: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    own_embedding: bool = False,
    draft_vocab: int = DRAFT_VOCAB_SIZE,
    hidden: int = HIDDEN,
    vocab: int = VOCAB_SIZE,
    prefix: str = "layers.0.",
    **_: Any,
) -> dict[str, np.ndarray]:
    """Tensors of a head with the decoder layer under ``prefix``; norms are far from 1, so a forgotten one shows."""
    random, head_dim = np.random.default_rng(seed), 32 if qwen3 else hidden // HEADS

    def matrix(rows: int, columns: int, scale: float = 2.0) -> np.ndarray:
        return (scale * random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(draft_vocab, hidden),
        **{f"{prefix}{name}.weight": norm(hidden) for name in ("input_layernorm", "hidden_norm")},
        f"{prefix}post_attention_layernorm.weight": norm(hidden),
        f"{attention}q_proj.weight": matrix(HEADS * head_dim, 2 * hidden),
        **{f"{attention}{name}_proj.weight": matrix(KV_HEADS * head_dim, 2 * hidden) for name in "kv"},
        f"{attention}o_proj.weight": matrix(hidden, HEADS * head_dim),
        **{f"{mlp}{name}_proj.weight": matrix(INNER, hidden) for name in ("gate", "up")},
        f"{mlp}down_proj.weight": matrix(hidden, INNER),
    }
    if qwen3:
        tensors |= {f"{attention}{name}_norm.weight": norm(head_dim) for name in "qk"}
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(3 * hidden)
    if fc_norm:
        tensors |= {f"fc_norm.{n}.weight": norm(hidden) for n in range(3)}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden)
    if draft_vocab < vocab:
        tokens = np.sort(random.permutation(vocab)[:draft_vocab])
        tensors["d2t"] = tokens - np.arange(draft_vocab)
        tensors["t2d"] = np.isin(np.arange(vocab), tokens)
    return tensors


def layer_config(
    *,
    qwen3: bool = False,
    rope: Mapping[str, Any] | None = None,
    hidden: int = HIDDEN,
    vocab: int = VOCAB_SIZE,
    **_: Any,
) -> dict[str, Any]:
    """The configuration of the decoder layer, as transformers writes one."""
    return {
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 32 if qwen3 else hidden // HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        **({"rope_scaling": dict(rope)} if rope else {}),
        "rope_theta": 20000.0,
    }


def write_head(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    of: str = "speculators",
    config: Mapping[str, Any] | None = None,
    layer: Mapping[str, Any] | None = None,
    without: str = "",
) -> Path:
    """Write a head into ``folder``.

    Args:
        options: one of :data:`OPTIONS`, and ``hidden`` and ``vocab`` of another target.
        of: ``"speculators"``, or ``"authors"`` for the format of the paper's authors.
        config, layer: further fields of ``config.json``, and of its decoder layer.
        without: a tensor to leave out.
    """
    options = dict(options or {})
    folder.mkdir(parents=True, exist_ok=True)
    flags: dict[str, Any] = {"draft_vocab_size": options.get("draft_vocab", DRAFT_VOCAB_SIZE)}
    flags |= {
        name: True for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if options.get(name)
    }
    own = {**layer_config(**options), **(layer or {})}
    if of == "speculators":
        own = {"speculators_model_type": "eagle3", "transformer_layer_config": own}
    (folder / "config.json").write_text(json.dumps({**own, **flags, **(config or {})}))
    tensors = head_tensors(**options, prefix="layers.0." if of == "speculators" else "midlayer.")
    if without:
        del tensors[without]
    save_file(tensors, folder / "model.safetensors")
    return folder
