"""The text part of a multimodal checkpoint: its configuration, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Beginnings of names in checkpoints of several generations, and how a model of text alone has them; the first that
#: fits. Tensors with other names are of images and sounds.
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
}
#: Types whose layers are another type's if there is nothing but text: the three positions of a token are equal.
_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
#: What only several positions of a token need.
_MULTIPLE_POSITIONS = frozenset({"mrope_section", "mrope_interleaved"})
#: Values that Gemma 3 of 4 billion parameters omits.
_DEFAULTS = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }
}
#: Fields of the whole that the part needs, or may need.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a multimodal model with a text part."""
    return isinstance(config.get("text_config"), Mapping) or str(config.get("model_type")) in _TYPES


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text part of a multimodal model, as that of a model of its own."""
    nested = config.get("text_config")
    part = dict(nested) if isinstance(nested, Mapping) else {k: v for k, v in config.items() if not _of_images(k)}
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    kind = part.get("model_type")
    kind = _TYPES.get(str(kind), kind)
    part = {**_DEFAULTS.get(str(kind), {}), **shared, **part, "model_type": kind}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(given := part.get(name), Mapping) and given.keys() & _MULTIPLE_POSITIONS:
            rest = {key: value for key, value in given.items() if key not in _MULTIPLE_POSITIONS}
            part[name] = {key: "default" if value == "mrope" else value for key, value in rest.items()}
    return part


def text_name(name: str) -> str | None:
    """Return a tensor's name in the model of text alone; None if it is not part of that."""
    return next((own + name[len(prefix) :] for prefix, own in PREFIXES.items() if name.startswith(prefix)), None)


def _of_images(field: str) -> bool:
    return field.startswith(("vision", "image", "video"))
