"""The drafter's dimensions, stored as ``config.json`` beside its weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moa_drafter.config_fields import ConfigError, check_fields
from moa_drafter.target_config import unknown_fields

#: More numbers than a layer of any model has in one direction; a file that asks for more is wrong.
_WIDEST = 1 << 17

#: Why a checkpoint, training run or configuration of version 0.1.0 cannot be used.
FIRST_LAYERS = (
    "first_layers must be 0: drafters with copies of the target's first layers are no longer supported "
    "(target_layers, copies of its last ones, are)"
)


@dataclass(frozen=True)
class LayerDims:
    """Dimensions of one Llama decoder layer: RMSNorm, grouped-query attention, SwiGLU MLP."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or not 1 <= value <= _WIDEST:
                raise ConfigError(f"{field.name} must lie in 1..{_WIDEST}, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, not {self.head_dim}")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], inside: str) -> LayerDims:
        """Parse the object of the field ``inside``.

        Raises:
            ConfigError: an unknown or missing field, or a value out of range.
        """
        check_fields(cls, raw, inside)
        return cls(**raw)


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes the drafter's tensor shapes.

    ``decoder`` serves both the self-attention and the cross-attention layer. The layer
    self-attention's width is the target's key-value vector, ``target_kv_size``. It sees the target
    layers named in ``lsa_layers``; the published drafter sees all of them.

    ``target_layers`` is how many copies of the target's last layers the device half contains, after the
    cross-attention. They are the target's own, frozen and no part of a checkpoint, unless ``trained_target_layers``.

    ``sharpness`` is the one number that fixes no shape: see :meth:`moa_drafter.drafter.Drafter.sharpen`.
    """

    target_num_layers: int
    target_kv_size: int
    vocab_size: int
    draft_vocab_size: int
    decoder: LayerDims
    layer_attention: LayerDims
    lsa_layers: tuple[int, ...]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    final_norm: bool = True
    layer_scale: bool = True
    target_fingerprint: str = ""
    architecture: str = "moa"
    target_layers: int = 0
    trained_target_layers: bool = False
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.layer_attention.hidden_size != self.target_kv_size:
            raise ConfigError(
                f"layer_attention.hidden_size ({self.layer_attention.hidden_size}) must equal "
                f"target_kv_size ({self.target_kv_size})"
            )
        if not self.lsa_layers or not all(0 <= i < self.target_num_layers for i in self.lsa_layers):
            raise ConfigError(
                f"lsa_layers must name layers 0..{self.target_num_layers - 1}, not {list(self.lsa_layers)}"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size must lie in 1..{self.vocab_size}, not {self.draft_vocab_size}")
        check_sharpness(self.sharpness)
        if self.architecture != "moa":
            raise ConfigError(f"architecture must be 'moa', not {self.architecture!r}")
        self._check_target_layers()

    def _check_target_layers(self) -> None:
        count = self.target_layers
        if not isinstance(count, int) or not 0 <= count < self.target_num_layers:
            raise ConfigError(
                f"target_layers must lie in 0..{self.target_num_layers - 1} (the target has "
                f"{self.target_num_layers} layers), not {count!r}"
            )
        if self.trained_target_layers and not count:
            raise ConfigError("no layer of the target to train: set target_layers")
        if count and not self.final_norm:
            raise ConfigError("target_layers need the norm that follows them: set final_norm")
        if count and 2 * self.decoder.num_kv_heads * self.decoder.head_dim != self.target_kv_size:
            raise ConfigError(
                "layers of the target need a decoder of its shape: its keys and values of a token are "
                f"{2 * self.decoder.num_kv_heads * self.decoder.head_dim} numbers, the target's {self.target_kv_size}"
            )

    @property
    def step_layers(self) -> int:
        """Decoder layers that a drafting step runs."""
        return 2 + self.target_layers

    @property
    def kv_heads(self) -> int:
        """Heads of keys, or of values, in a cache entry and in a memory row: those of the self-attention or of the
        cross-attention, then of the ``target_layers``."""
        return (1 + self.target_layers) * self.decoder.num_kv_heads

    @property
    def tail_layers(self) -> tuple[int, ...]:
        """Which of the target's layers follow on the cross-attention, counted from 0."""
        return tuple(range(self.target_num_layers - self.target_layers, self.target_num_layers))

    @property
    def memory_row_size(self) -> int:
        """Numbers in one memory row: all its keys and values."""
        return 2 * self.kv_heads * self.decoder.head_dim

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Parse what :meth:`to_json` wrote, also that of version 0.1.0, which had a field ``first_layers``.

        Raises:
            ConfigError: an unknown or missing field, a value out of range, or a drafter with copies of the target's
                first layers.
        """
        raw = dict(raw)
        if raw.pop("first_layers", 0) != 0:
            raise ConfigError(FIRST_LAYERS)
        check_fields(cls, raw)
        layers = {name: LayerDims.from_mapping(raw[name], name) for name in ("decoder", "layer_attention")}
        return cls(**{**raw, **layers, "lsa_layers": tuple(raw["lsa_layers"])})


def config_for_target(
    target: Any,
    *,
    draft_vocab_size: int,
    lsa_layers: int = 6,
    target_layers: int = 0,
    trained_target_layers: bool = False,
    target_fingerprint: str = "",
) -> DrafterConfig:
    """Default drafter dimensions for a Llama-like target.

    Self- and cross-attention take the shape of one target layer, so they can start from its weights.

    Args:
        target: the target's transformers configuration.
        draft_vocab_size: rows of the draft head, at most the target's vocabulary.
        lsa_layers: how many target layers, evenly spaced and ending with the last, are seen.
        target_layers, trained_target_layers: see :class:`DrafterConfig`.
        target_fingerprint: see :func:`moa_drafter.target.target_fingerprint`.

    Raises:
        ConfigError: a number out of range.
    """
    head_dim, kv_size = head_size(target), key_value_size(target)
    layers = target.num_hidden_layers
    seen = min(lsa_layers, layers)
    if target_layers:
        check_copied_exactly(target)
    return DrafterConfig(
        target_num_layers=layers,
        target_kv_size=kv_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(draft_vocab_size, target.vocab_size),
        decoder=LayerDims(
            hidden_size=target.hidden_size,
            num_heads=target.num_attention_heads,
            num_kv_heads=target.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=target.intermediate_size,
        ),
        layer_attention=LayerDims(
            hidden_size=kv_size,
            num_heads=2 * target.num_key_value_heads,
            num_kv_heads=target.num_key_value_heads,
            head_dim=head_dim,
            intermediate_size=2 * kv_size,
        ),
        lsa_layers=tuple(layers - 1 - (i * layers) // seen for i in range(seen))[::-1],
        rope_theta=rope_theta_of(target),
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        target_fingerprint=target_fingerprint,
        target_layers=target_layers,
        trained_target_layers=trained_target_layers,
    )


def check_sharpness(value: Any) -> None:
    """Raises ConfigError: no positive number."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"sharpness must be a positive number, not {value!r}")


def check_copied_exactly(target: Any) -> None:
    """Raises ConfigError: a target whose layers compute what :class:`moa_drafter.llama.DecoderLayer` does not."""
    rope = getattr(target, "rope_parameters", None) or getattr(target, "rope_scaling", None) or {}
    kind, activation = rope.get("rope_type", "default"), getattr(target, "hidden_act", "silu")
    advice = "use 0 target layers, another architecture than early-exit, another offline model"
    if unknown := unknown_fields(target):
        raise ConfigError(
            f"layers cannot be copied from a target whose configuration has {', '.join(unknown)}: {advice}"
        )
    if kind != "default" or activation != "silu":
        raise ConfigError(
            "layers can be copied from a target with plain rotary positions and SwiGLU, this one has "
            f"{kind!r} positions and {activation!r}: {advice}"
        )


def head_size(target: Any) -> int:
    """Numbers of one attention head, of a transformers configuration."""
    return getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads


def key_value_size(target: Any) -> int:
    """Numbers of one token's keys and values in one layer, of a transformers configuration."""
    return 2 * target.num_key_value_heads * head_size(target)


def rope_theta_of(target: Any) -> float:
    """The rotary base of a transformers configuration, where versions 4 and 5 keep it."""
    parameters = getattr(target, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0)
