"""``--memory``: refuse a target that does not fit, before its weights are fetched."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from moa_decoder.checkpoint_weights import read_config
from moa_decoder.errors import TargetError
from moa_decoder.families import has_tied_head, spec_of_config, tensor_names
from moa_decoder.tensor_layout import TensorLayout
from moa_drafter.catalogue import CATALOGUE, ModelSize
from moa_drafter.target_folder import gguf_of
from moa_drafter.target_source import BUILTIN, check_target, fetch_hub_texts, is_hub_id
from moa_runtime.paths import expanded
from moa_server.engine.base import EngineError
from moa_server.engine.dtypes import has_bfloat16


def check_memory(model: str, dtype: str, device: str, cache_tokens: int, most: float) -> None:
    """Check that weights and full caches of a target fit.

    Args:
        model: see :func:`moa_drafter.target_source.resolve_target`; a GGUF file has its own size.
        dtype: one of :data:`moa_server.engine.dtypes.DTYPES`.
        most: gigabytes (10^9 bytes).

    Raises:
        EngineError: ``too_large``; the message names a type that fits, if there is one.
        TargetError: the configuration cannot be read or fetched.
    """
    size = size_of(model)
    if size is None:
        return
    # A GGUF file has its own type: the built-in target's is int4.
    named = "int4" if dtype == "auto" and model in BUILTIN else _computed_in(dtype, device)
    needed = size.bytes_needed(named, cache_tokens) / 1e9
    if needed <= most:
        return
    others = [] if device != "cpu" or not size.rounds else [each for each in ("int8", "int4") if each != named]
    fitting = next((each for each in others if size.bytes_needed(each, cache_tokens) / 1e9 <= most), None)
    smaller = f"take --dtype {fitting}" if fitting else "choose a smaller model (moa-serve --list-models)"
    text = f"{model} takes {needed:.1f} GB in {named} with --cache-tokens {cache_tokens}, and --memory allows {most:g}"
    raise EngineError(f"{text}: {smaller}, or fewer --cache-tokens", code="too_large")


def size_of(model: str) -> ModelSize | None:
    """Return the sizes of a target, without its weights; None if its family is not described, or its file is local and
    quantised."""
    if model in CATALOGUE:
        return CATALOGUE[model].size
    check_target(model)
    folder = expanded(model)
    if not folder.exists() and is_hub_id(model):
        folder = fetch_hub_texts(model)
    return None if not folder.is_dir() or gguf_of(folder) else _described(folder)


def _described(folder: Path) -> ModelSize | None:
    config = read_config(folder)
    try:
        spec = spec_of_config(config)
    except TargetError:
        return None
    shapes = TensorLayout(spec, tensor_names(config), tied=has_tied_head(config)).shapes
    numbers = sum(2 * layer.kv_heads * layer.head_dim for layer in spec.layers)
    return ModelSize(sum(map(math.prod, shapes.values())), numbers)


def _computed_in(dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    native = device != "cpu" or (has_bfloat16() and importlib.util.find_spec("torch") is not None)
    return "bfloat16" if native else "float32"
