"""The error of targets."""

from __future__ import annotations

from moa_runtime.errors import MoaError


class TargetError(MoaError):
    """A target model that cannot be found, is not whole, or is not a Llama-like causal language model."""
