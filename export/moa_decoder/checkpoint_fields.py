"""Fields of a checkpoint's JSON files: read in one place, and checked there before a program computes with them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moa_decoder.errors import TargetError
from moa_runtime.checked_file import read_checked

#: No model has more layers, or a larger size of anything; a damaged number shall not take memory.
MOST_LAYERS, LARGEST = 1 << 12, 1 << 28
#: Bytes of a file; a tokenizer is the largest.
LARGEST_JSON = 1 << 27
#: Whole numbers that all JSON programs can exchange (RFC 8259), and levels of objects and lists, of a config.json.
_MOST, _DEEPEST = 1 << 53, 32
_Kind = tuple[str, Callable[[Any], bool]]


def _whole(least: int, most: int = LARGEST) -> _Kind:
    return f"a whole number in {least}..{most}", lambda value: type(value) is int and least <= value <= most


def _number(most: float) -> _Kind:
    return f"a number in 0..{most:g}", lambda value: type(value) in (int, float) and 0 <= value <= most


def _or_list(kind: _Kind) -> _Kind:
    words, is_one = kind

    def fits(value: Any) -> bool:
        return is_one(value) or (isinstance(value, list) and all(one is None or is_one(one) for one in value))

    return f"{words}, or a list of such", fits


def _is_template(value: Any) -> bool:
    named = isinstance(value, Mapping) and all(isinstance(value.get(name), str) for name in ("name", "template"))
    return isinstance(value, str) or named


_LAYERS, _SIZE, _COUNT = _whole(1, MOST_LAYERS), _whole(1), _whole(0)
_IDS = _or_list(_whole(-1, (1 << 31) - 1))  # -1 for none
_TEXT: _Kind = ("a text", lambda value: isinstance(value, str))
_TEXTS: _Kind = (
    "a list of texts",
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
)
_FLAG: _Kind = ("true or false", lambda value: type(value) is bool)
_OBJECT: _Kind = ("an object", lambda value: isinstance(value, Mapping))
_TOKEN: _Kind = (
    "a text, or an object with its content",
    lambda value: isinstance(value.get("content") if isinstance(value, Mapping) else value, str),
)
_TEMPLATES: _Kind = _or_list(("a text, or an object with name and template", _is_template))
_TOKENS = dict.fromkeys([f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")], _TOKEN)
_CONFIG: Mapping[str, _Kind] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), _LAYERS),
    **dict.fromkeys(("vocab_size", "hidden_size", "max_position_embeddings", "num_attention_heads"), _SIZE),
    "num_key_value_heads": _or_list(_SIZE),
    **dict.fromkeys(("head_dim", "intermediate_size", "moe_intermediate_size"), _or_list(_COUNT)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _or_list(_COUNT)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "original_max_position_embeddings"), _COUNT),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "rope_theta"), _number(1e12)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), _number(1)),
    **dict.fromkeys(("tie_word_embeddings", "is_causal", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config"), _OBJECT),
    **dict.fromkeys(("dtype", "torch_dtype"), _TEXT),
    "eos_token_id": _IDS,
    "layer_types": _TEXTS,
}
#: Kinds of the fields that are read, by file. A field that is missing or null has its default.
CHECKED: Mapping[str, Mapping[str, _Kind]] = {
    "config.json": _CONFIG,
    "generation_config.json": {
        "eos_token_id": _IDS,
        "do_sample": _FLAG,
        "temperature": _number(1e6),
        "top_p": _number(1),
    },
    "tokenizer_config.json": {"chat_template": _TEMPLATES, **_TOKENS},
    "special_tokens_map.json": _TOKENS,
}


def read_fields(path: Path) -> dict[str, Any]:
    """Read an object of a JSON file, whose fields are of the kinds in :data:`CHECKED`.

    Raises:
        TargetError: ``file_missing``, ``unreadable``.
    """
    try:
        read = json.loads(read_checked(path, LARGEST_JSON))
        if not isinstance(read, dict):
            raise ValueError("no object")
    except FileNotFoundError as error:
        raise TargetError(f"there is no {path}: fetch the target again", code="file_missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} is unreadable: fetch the target again", code="unreadable") from error
    kinds = CHECKED.get(path.name, {})
    _check(path, "", read, kinds)
    if isinstance(part := read.get("text_config"), Mapping):
        _check(path, "text_config.", part, kinds)
    if path.name == "config.json":
        _check_numbers(path, "", read, _DEEPEST)
    return read


def _check(path: Path, inside: str, values: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for name, (words, is_one) in kinds.items():
        if (value := values.get(name)) is not None and not is_one(value):
            raise _wrong(path, inside + name, words, value)


def _check_numbers(path: Path, name: str, value: Any, levels: int) -> None:
    """Refuse numbers that no program computes with, wherever they stand, and objects that lie too deep."""
    if not levels:
        raise _wrong(path, name, f"nested at most {_DEEPEST} deep", value)
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(path, f"{name}.{key}" if name else str(key), each, levels - 1)
    elif isinstance(value, int) and abs(value) >= _MOST:
        raise _wrong(path, name, f"less than {_MOST}", value)


def _wrong(path: Path, name: str, words: str, value: object) -> TargetError:
    return TargetError(
        f"{name} in {path} must be {words}, not {reprlib.repr(value)}: fetch the target again", code="unreadable"
    )
