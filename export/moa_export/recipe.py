"""What an export quantises and how far it may stray; says nothing about packing or runtimes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moa_drafter.config import DrafterConfig, RivalConfig
from moa_export.errors import ExportError

#: Widths that stored weights can have. 32 is float32, 16 float16; 8 and 4 are integers with scales.
BITS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Weights:
    """How the stored weights of one part are rounded.

    Attributes:
        bits: one of :data:`BITS`.
        group_size: consecutive inputs of one output row that share a scale; 0 for one scale a row. Of no
            effect from 16 bits on.
        symmetric: whether 0 is represented without an offset.

    Raises:
        ExportError: bits or a group size that there is not.
    """

    bits: int = 8
    group_size: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ExportError(f"weights can have {', '.join(map(str, BITS))} bits, not {self.bits}")
        if self.group_size < 0 or self.group_size % 16:
            raise ExportError(f"a group size must be a multiple of 16, or 0 for one scale a row, not {self.group_size}")

    @property
    def is_integer(self) -> bool:
        return self.bits < 16

    def check_divides(self, sizes: Mapping[str, int]) -> None:
        """Raises ExportError: the groups do not divide one of the ``sizes``, each given by its name."""
        if not self.is_integer or not self.group_size:
            return
        for name, size in sizes.items():
            if size % self.group_size:
                raise ExportError(
                    f"a group size of {self.group_size} does not divide the drafter's {name} of {size}: choose a "
                    "divisor with --group-size"
                )


@dataclass(frozen=True)
class Tolerance:
    """The most an exported graph may differ from the float32 device half.

    Attributes:
        mean_logprob_error: mean absolute error of the top-k log-probabilities (nats).
        top1_agreement: least share of queries with the same most probable token. Loosest of the three, because
            two candidates of nearly equal probability trade places under any rounding.
        top_k_overlap: least mean share of the top-k tokens found in both.
        tau_loss: most that tau may fall, as a share of the float32 tau.
    """

    mean_logprob_error: float = 0.1
    top1_agreement: float = 0.93
    top_k_overlap: float = 0.94
    tau_loss: float = 0.02


@dataclass(frozen=True)
class Recipe:
    """Which weights are quantised to how many bits.

    Attributes:
        linear: the layers' matrices.
        head: the draft head.
        embedding: the token embedding.
        activation_bits: 8 (rounded on the fly where a target can, so that products run in integers) or 32.
        top_k: candidates per query that the graph returns.
    """

    linear: Weights = field(default_factory=Weights)
    head: Weights = field(default_factory=Weights)
    embedding: Weights = field(default_factory=lambda: Weights(group_size=0))
    activation_bits: int = 8
    top_k: int = 16
    tolerance: Tolerance = field(default_factory=Tolerance)

    def describe(self) -> dict[str, Any]:
        """The resolved recipe in plain values, as the manifest keeps it."""
        return dataclasses.asdict(self)

    def check_divides(self, config: DrafterConfig | RivalConfig) -> None:
        """Raises ExportError: a part's groups do not divide the drafter's sizes."""
        decoder = config.decoder
        hidden = {"hidden size": decoder.hidden_size}
        inner = {"FFN": decoder.intermediate_size, "attention width": decoder.num_heads * decoder.head_dim}
        self.linear.check_divides({**hidden, **inner})
        self.head.check_divides(hidden)
        self.embedding.check_divides(hidden)

    @classmethod
    def from_description(cls, plain: Mapping[str, Any]) -> Recipe:
        """The recipe that :meth:`describe` described.

        Raises:
            ExportError: a field that this version does not know.
        """
        try:
            parts = {name: Weights(**plain[name]) for name in ("linear", "head", "embedding")}
            return cls(**{**plain, **parts, "tolerance": Tolerance(**plain["tolerance"])})
        except (KeyError, TypeError) as error:
            raise ExportError(f"the bundle's recipe is not one of this version: {error}; export it again") from error
