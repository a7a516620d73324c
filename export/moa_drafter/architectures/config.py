"""What the configurations of all rivals have in common; stored as ``config.json`` beside the weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moa_drafter.config import DrafterConfig, LayerDims, check_sharpness
from moa_drafter.config_fields import ConfigError, check_fields

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class RivalConfig:
    """Shapes of a drafter whose decoder layers have the shape of one layer of the target.

    Attributes:
        decoder: of every layer.
        target_num_layers, target_kv_size, vocab_size, target_fingerprint: of the target it was made for.
        sharpness: see :meth:`moa_drafter.drafter.Drafter.sharpen`.
    """

    target_num_layers: int
    target_kv_size: int
    vocab_size: int
    draft_vocab_size: int
    decoder: LayerDims
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    target_fingerprint: str = ""
    architecture: str = ""
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size must lie in 1..{self.vocab_size}, not {self.draft_vocab_size}")
        check_sharpness(self.sharpness)

    @classmethod
    def like(cls, config: DrafterConfig, **own: Any) -> Self:
        """For the target of a Mixture of Attentions drafter; ``own`` are the architecture's own fields."""
        shared = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(RivalConfig)
            if field.name != "architecture"
        }
        return cls(**shared, **own)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """Parse what :meth:`to_json` wrote.

        Raises:
            ConfigError: an unknown or missing field, or a value out of range.
        """
        check_fields(cls, raw)
        return cls(**{**raw, "decoder": LayerDims.from_mapping(raw["decoder"], "decoder")})


@dataclass(frozen=True, kw_only=True)
class TokenConfig(RivalConfig):
    """Of a drafter that looks at the tokens alone."""

    @property
    def step_layers(self) -> int:
        """Decoder layers that a drafting step runs."""
        raise NotImplementedError

    @property
    def kv_heads(self) -> int:
        """Heads of keys, or of values, in a cache entry: those of all layers."""
        return self.step_layers * self.decoder.num_kv_heads
