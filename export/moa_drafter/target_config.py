"""What a target's configuration says of how it computes: fields that Llama's layers have no place for, and the longest
context."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

#: What a class declares that computes as Llama does. Sizes, biases and the activation are seen in the modules, rotary
#: positions are computed by the target's own module, windows bound the context; the rest is of no concern in inference.
_KNOWN = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "attention_dropout",
        "residual_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "initializer_range",
        "pretraining_tp",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "eod_token_id",
        "pad_token_id",
    }
)
#: Of its rotary positions: read by the module that computes them, all of them.
_KNOWN_ROPE = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)


def unknown_fields(config: Any, known_rope: Collection[str] = ()) -> list[str]:
    """Fields by which a target may compute something else than Llama: those that its class declares and that are not
    known, unless they are None. What a class does not declare its model does not read.

    Args:
        config: transformers' configuration.
        known_rope: further fields of the rotary positions that the caller computes with.
    """
    from transformers import PreTrainedConfig

    declared = {field.name for field in dataclasses.fields(config)}
    declared -= {field.name for field in dataclasses.fields(PreTrainedConfig)} | _KNOWN
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    found = [name for name in sorted(declared) if getattr(config, name) is not None]
    unread = sorted(rope.keys() - _KNOWN_ROPE - set(known_rope))
    found += [f"rope_parameters.{name}" for name in unread if rope[name] is not None]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return found + [f"layer_types: {kind}" for kind in sorted(kinds)]


def original_contexts(config: Any) -> set[int]:
    """Lengths after which rotary positions or attention are computed in another way."""
    name = "original_max_position_embeddings"
    return {int(rope[name]) for rope in ropes(config) if name in rope}


def longest_context(config: Any) -> tuple[int, str]:
    """How many tokens a target's context may have, and why no more.

    A window counts as the limit, for caches keep every token. So does the original context of a longrope: after it the
    keys of all earlier tokens would have to be computed anew.
    """
    limits = [(int(config.max_position_embeddings), "its max_position_embeddings")]
    for name in ("sliding_window", "attention_chunk_size"):
        if window := getattr(config, name, None):
            limits.append((int(window), f"some layers look no further back (its {name})"))
    if any(rope.get("rope_type") == "longrope" for rope in ropes(config)):
        reason = "after these its rotary positions change for all tokens (longrope)"
        limits += [(length, reason) for length in original_contexts(config)]
    return min(limits)


def ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of its rotary positions; some families have several, by the kind of a layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
