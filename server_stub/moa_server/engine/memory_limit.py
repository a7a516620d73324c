"""``--memory``: refuse a target that does not fit, before its weights are fetched."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_decoder.checkpoint_weights import read_config, stored_tensors
from moa_decoder.errors import TargetError
from moa_decoder.families import has_tied_head, spec_of_config, tensor_names
from moa_decoder.gguf_file import is_gguf, parts_of
from moa_decoder.gguf_weights import GgufWeights
from moa_decoder.tensor_layout import TensorLayout
from moa_drafter.catalogue import CATALOGUE, ModelSize
from moa_drafter.target_folder import gguf_of
from moa_drafter.target_source import BUILTIN, check_target, fetch_hub_texts, is_hub_id
from moa_drafter.transformers_config import UNDESCRIBED
from moa_runtime.paths import expanded
from moa_server.engine.base import EngineError
from moa_server.engine.dtypes import BITS, has_bfloat16

_log = logging.getLogger(__name__)
#: Tokens of caches below which a model is of no use: some questions and answers.
_LEAST_CACHE = 4096


def check_memory(model: str, dtype: str, device: str, cache_tokens: int, most: float) -> None:
    """Check that weights and full caches of a target fit.

    Args:
        model: see :func:`moa_drafter.target_source.resolve_target`.
        dtype: one of :data:`moa_server.engine.dtypes.DTYPES`.
        most: gigabytes (10^9 bytes).

    Raises:
        EngineError: ``too_large``; the message names options that fit, if there are any.
        TargetError: the configuration cannot be read or fetched.
    """
    size = size_of(model)
    if size is None:
        _log.warning("--memory is not checked: the sizes of %s are not known before its weights are fetched", model)
        return
    named = _stored_type(model) if dtype == "auto" else dtype
    if dtype == "auto" and named not in ("int4", "int8"):  # those are of a GGUF file
        named = "float32" if device == "cpu" and not (named == "bfloat16" and _computes_bfloat16()) else "bfloat16"
    needed = size.bytes_needed(named, cache_tokens) / 1e9
    if needed <= most:
        return
    others = [] if device != "cpu" or not size.rounds else [each for each in ("int8", "int4") if each != named]
    shown = f"{needed:.1f}" if needed >= 0.1 else f"{needed:.1g}"
    text = f"{model} takes {shown} GB in {named} with --cache-tokens {cache_tokens}, and --memory allows {most:g}"
    raise EngineError(f"{text}: {_remedy(size, (named, *others), cache_tokens, most * 1e9)}", code="too_large")


def _remedy(size: ModelSize, dtypes: Sequence[str], cache_tokens: int, most: float) -> str:
    """Return the options with which a target fits into ``most`` bytes: the type with the largest caches, the first of
    ``dtypes``, which is taken now, if they are equal."""
    room = {each: min(cache_tokens, size.cache_tokens_within(each, most) // 1024 * 1024) for each in dtypes}
    best = max(room, key=lambda each: room[each])
    if room[best] < min(cache_tokens, _LEAST_CACHE):
        return "choose a smaller model (moa-serve --list-models)"
    options = [f"--dtype {best}"] if best != dtypes[0] else []
    if room[best] < cache_tokens:
        options.append(f"--cache-tokens {room[best]}")
    return f"pass {' '.join(options)}"


def check_rounded_type(model: str, dtype: str) -> None:
    """Check that a target whose weights are not here can be computed in 8 or 4 bits, before they are fetched.

    Raises:
        EngineError: ``unsupported_type``.
        TargetError: the configuration cannot be read or fetched.
    """
    if dtype in ("int8", "int4") and not expanded(model).exists():
        size = size_of(model)
        if size is None or not size.rounds:
            raise unrounded(model, dtype)


def unrounded(model: str, dtype: str) -> EngineError:
    """Return the error for a target of a family that is not computed in ``dtype``."""
    text = f"--dtype {dtype} is for families that are built in, and {model} is of another"
    return EngineError(f"{text}: choose auto, float32 or bfloat16", code="unsupported_type")


def size_of(model: str) -> ModelSize | None:
    """Return the sizes of a target. None if they are not known without its weights, which are not here: its family is
    not described."""
    if model in CATALOGUE:
        return CATALOGUE[model].size
    place = _place(model)
    parts = _parts(place)
    try:
        file = GgufWeights(parts) if parts else None
        config = file.config if file else read_config(place)
        spec = file.spec if file else spec_of_config(config)
    except TargetError as error:
        if error.code not in UNDESCRIBED:
            raise
        return None if parts else _undescribed(place, read_config(place))
    shapes = TensorLayout(spec, tensor_names(config), tied=has_tied_head(config)).shapes
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in spec.layers)
    return ModelSize(sum(map(math.prod, shapes.values())), numbers)


def _undescribed(folder: Path, config: Mapping[str, Any]) -> ModelSize | None:
    try:
        tensors = stored_tensors(folder)
    except TargetError:
        return None

    def size_in(field: str, other: int) -> int:
        value = config.get(field)
        return value if type(value) is int and value > 0 else other  # a list, of all layers

    heads = size_in("num_attention_heads", 1)
    size = size_in("head_dim", size_in("hidden_size", 0) // heads)
    numbers = 2 * size_in("num_hidden_layers", 0) * size_in("num_key_value_heads", heads) * size
    return ModelSize(sum(math.prod(tensor.shape) for tensor in tensors.values()), numbers, rounds=False)


def _place(model: str) -> Path:
    """Return a target's file, or its folder, in which the weights may be missing."""
    check_target(model)
    place = expanded(model)
    return fetch_hub_texts(model) if not place.exists() and is_hub_id(model) else place


def _parts(place: Path) -> list[Path]:
    """Return the parts of a target's GGUF file; none if it is a checkpoint."""
    return parts_of(place) if is_gguf(place) else gguf_of(place)


def _stored_type(model: str) -> str:
    if model in CATALOGUE:
        return "int4" if model in BUILTIN else "bfloat16"
    place = _place(model)
    if parts := _parts(place):
        bits = GgufWeights(parts).bits
        return next(name for name, each in BITS.items() if each == bits)
    config = read_config(place)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _computes_bfloat16() -> bool:
    return bool(has_bfloat16()) and importlib.util.find_spec("torch") is not None
