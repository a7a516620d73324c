"""Settings of a target: type of its products, length of its context."""

from __future__ import annotations

import torch

from moa_drafter.target import Target, TargetFacts
from moa_drafter.target_config import longest_context
from moa_runtime.errors import MoaError

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineError(MoaError):
    """Target, drafter and settings do not fit together."""


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the type of the products: "float32", "bfloat16", or "auto" for float32 on a CPU and bfloat16 elsewhere.

    Raises:
        EngineError: the name is unknown.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _TYPES:
        raise EngineError(f"the type {name} is not supported: choose auto, {' or '.join(_TYPES)}")
    return _TYPES[name]


def context_of(target: Target | TargetFacts, wanted: int | None, spare: int = 0) -> int:
    """Return the context in tokens, see :func:`moa_drafter.target_config.longest_context`.

    Args:
        spare: tokens of it that the engine needs itself.

    Raises:
        EngineError: more than the target can hold, or too little for any answer.
    """
    longest, reason = longest_context(target.config)
    own = longest - spare
    if wanted is None:
        return own
    if not 2 <= wanted <= own:
        raise EngineError(f"a context of {wanted} tokens was asked for, this target can hold 2 to {own}: {reason}")
    return wanted
