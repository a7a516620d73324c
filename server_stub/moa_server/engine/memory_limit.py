"""``--memory``: refuse a target that does not fit, before its weights are fetched."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping
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


def check_memory(model: str, dtype: str, device: str, cache_tokens: int, most: float) -> None:
    """Check that weights and full caches of a target fit.

    Args:
        model: see :func:`moa_drafter.target_source.resolve_target`.
        dtype: one of :data:`moa_server.engine.dtypes.DTYPES`.
        most: gigabytes (10^9 bytes).

    Raises:
        EngineError: ``too_large``; the message names a type that fits, if there is one.
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
    fitting = next((each for each in others if size.bytes_needed(each, cache_tokens) / 1e9 <= most), None)
    smaller = f"take --dtype {fitting}" if fitting else "choose a smaller model (moa-serve --list-models)"
    shown = f"{needed:.1f}" if needed >= 0.1 else f"{needed:.1g}"
    text = f"{model} takes {shown} GB in {named} with --cache-tokens {cache_tokens}, and --memory allows {most:g}"
    raise EngineError(f"{text}: {smaller}, or fewer --cache-tokens", code="too_large")


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
