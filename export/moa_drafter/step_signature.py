"""Inputs and outputs of the device half by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from moa_drafter.config import DrafterConfig, Eagle3Config, TokenConfig
from moa_runtime.backends.base import MEMORY_INPUTS, StepInputs, StepResult
from moa_runtime.backends.eagle3 import Eagle3Inputs, Eagle3Result
from moa_runtime.manifest import TensorSpec


def signature(
    config: DrafterConfig | TokenConfig | Eagle3Config, top_k: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of the device half, see :func:`signature_of`; of an EAGLE-3 head those of a pass,
    see :class:`moa_runtime.backends.eagle3.Eagle3Inputs`."""
    kv_shape, top_k = (config.kv_heads, config.decoder.head_dim), min(top_k, config.draft_vocab_size)
    if isinstance(config, Eagle3Config):
        sizes = {"H": kv_shape[0], "D": kv_shape[1], "K": top_k, "F": config.decoder.hidden_size}
        return specs_of(Eagle3Inputs, sizes), specs_of(Eagle3Result, sizes)
    return signature_of(kv_shape, top_k, row_heads=config.kv_heads if isinstance(config, DrafterConfig) else 0)


def signature_of(
    kv_shape: tuple[int, int], top_k: int, *, row_heads: int = 0
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of a step: the fields of :class:`~moa_runtime.backends.base.StepInputs` and
    :class:`~moa_runtime.backends.base.StepResult`, in order. Variable sizes keep their letters. ``row_heads`` are those
    of a memory row; 0 if the step reads none."""
    sizes = {"H": kv_shape[0], "D": kv_shape[1], "K": top_k, "R": row_heads}
    inputs, outputs = specs_of(StepInputs, sizes), specs_of(StepResult, sizes)
    return tuple(spec for spec in inputs if row_heads or spec.name not in MEMORY_INPUTS), outputs


def specs_of(kind: type[Any], sizes: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Return the arrays that are the fields of a dataclass; ``sizes`` are those that do not vary, by letter."""
    return tuple(
        TensorSpec(each.name, each.metadata["dtype"], tuple(sizes.get(n, n) for n in each.metadata["shape"]))
        for each in fields(kind)
    )
