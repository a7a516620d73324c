"""The error of all sources of a model."""

from __future__ import annotations

from moa_runtime.errors import MoaError


class TargetError(MoaError):
    """A target model that cannot be found, is incomplete, or is not a Llama-like causal language model."""
