"""What an export quantises and how far it may stray; says nothing about packing or runtimes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """The most an exported graph may differ from the float32 device half, over all queries of the parity check.

    Attributes:
        mean_logprob_error: mean absolute error of the top-k log-probabilities (nats).
        top1_agreement: least share of queries with the same most probable token. Loosest of the three, because
            two candidates of nearly equal probability trade places under any rounding.
        top_k_overlap: least mean share of the top-k tokens found in both.
    """

    mean_logprob_error: float = 0.1
    top1_agreement: float = 0.90
    top_k_overlap: float = 0.92


@dataclass(frozen=True)
class Recipe:
    """Which weights are quantised to how many bits.

    Attributes:
        embedding_bits: 8 (symmetric, one scale per token) or 32.
        weight_bits: 8 or 32, for the linear layers and the draft head.
        group_size: weights of one output row that share a scale.
        top_k: candidates per query that the graph returns.
    """

    embedding_bits: int = 8
    weight_bits: int = 8
    group_size: int = 32
    top_k: int = 8
    tolerance: Tolerance = field(default_factory=Tolerance)

    def describe(self) -> dict[str, Any]:
        """What the manifest says about the quantisation, in plain values."""
        plain = dataclasses.asdict(self)
        return {name: plain[name] for name in ("embedding_bits", "weight_bits", "group_size")}
