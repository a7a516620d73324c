"""Configurations of all drafters, stored as ``config.json`` beside the weights, and the files of a checkpoint.

Needs no torch, so that a command line can find a checkpoint at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_runtime.errors import MoaError

if TYPE_CHECKING:
    from typing_extensions import Self

    from moa_drafter.target import Target, TargetFacts

#: What a class declares that computes as Llama does. Sizes, biases and the activation are seen in the modules, rotary
#: positions are computed by the target's own module, windows bound the context; the rest is of no concern in inference.
_KNOWN = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "attention_bias",
        "attention_out_bias",
        "mlp_bias",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "attention_dropout",
        "residual_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "initializer_range",
        "pretraining_tp",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "eod_token_id",
        "pad_token_id",
    }
)
#: Of its rotary positions: read by the module that computes them, all of them.
_KNOWN_ROPE = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)


def unknown_fields(config: Any, known_rope: Collection[str] = ()) -> list[str]:
    """Fields by which a target may compute something else than Llama: those that its class declares and that are not
    known, unless they are None. What a class does not declare its model does not read.

    Args:
        config: transformers' configuration.
        known_rope: further fields of the rotary positions that the caller computes with.
    """
    from transformers import PreTrainedConfig

    declared = {field.name for field in dataclasses.fields(config)}
    declared -= {field.name for field in dataclasses.fields(PreTrainedConfig)} | _KNOWN
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    found = [name for name in sorted(declared) if getattr(config, name) is not None]
    unread = sorted(rope.keys() - _KNOWN_ROPE - set(known_rope))
    found += [f"rope_parameters.{name}" for name in unread if rope[name] is not None]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return found + [f"layer_types: {kind}" for kind in sorted(kinds)]


def original_contexts(config: Any) -> set[int]:
    """Lengths after which rotary positions or attention are computed in another way."""
    name = "original_max_position_embeddings"
    return {int(rope[name]) for rope in ropes(config) if name in rope}


def longest_context(config: Any) -> tuple[int, str]:
    """How many tokens a target's context may have, and why no more.

    A window counts as the limit, for caches keep every token. So does the original context of a longrope: after it the
    keys of all earlier tokens would have to be computed anew.
    """
    limits = [(int(config.max_position_embeddings), "its max_position_embeddings")]
    for name in ("sliding_window", "attention_chunk_size"):
        if window := getattr(config, name, None):
            limits.append((int(window), f"some layers look no further back (its {name})"))
    if any(rope.get("rope_type") == "longrope" for rope in ropes(config)):
        reason = "after these its rotary positions change for all tokens (longrope)"
        limits += [(length, reason) for length in original_contexts(config)]
    return min(limits)


def ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of its rotary positions; some families have several, by the kind of a layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]


CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
#: Where a training run keeps its checkpoint.
CHECKPOINT_FOLDER = "drafter"
#: Largest width accepted for a layer; no model has a wider one.
_WIDEST = 1 << 17
#: Why a checkpoint, training run or configuration of version 0.1.0 cannot be used.
FIRST_LAYERS = (
    "first_layers must be 0: drafters with copies of the target's first layers are no longer supported "
    "(target_layers, copies of its last ones, are)"
)


class CheckpointError(MoaError):
    """A drafter checkpoint that cannot be found or loaded; the message names the folder, file or tensor."""


class ConfigError(MoaError, ValueError):
    """A drafter configuration that cannot be built; the message names the field."""


class FitError(MoaError):
    """A drafter whose shapes are not the target's."""


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
    """Tensor shapes of a Mixture of Attentions drafter.

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


@dataclass(frozen=True, kw_only=True)
class RivalConfig:
    """Shapes of a drafter whose decoder layers have the shape of one layer of the target.

    Attributes:
        decoder: the shape of every layer.
        target_num_layers, target_kv_size, vocab_size, target_fingerprint: properties of the target.
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
        """Make a configuration for the target of a Mixture of Attentions drafter.

        Args:
            own: the architecture's own fields.
        """
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
    """Shapes of a drafter that reads tokens alone."""

    @property
    def step_layers(self) -> int:
        """Decoder layers that a drafting step runs."""
        raise NotImplementedError

    @property
    def kv_heads(self) -> int:
        """Heads of keys, or of values, in a cache entry: those of all layers."""
        return self.step_layers * self.decoder.num_kv_heads


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


def check_fit(config: DrafterConfig | RivalConfig, target: Target | TargetFacts) -> str:
    """Check that a drafter was made for a target.

    Returns:
        a warning if the shapes fit but the fingerprints differ (such as the Hub's copy and the wheel's), which costs
        accepted tokens but no correctness; otherwise the empty string.

    Raises:
        FitError: a size differs; the message names the first one.
    """
    theirs = target.config
    for what, ours, found in (
        ("number of layers", config.target_num_layers, theirs.num_hidden_layers),
        ("numbers of keys and values per token and layer", config.target_kv_size, key_value_size(theirs)),
        ("hidden size", config.decoder.hidden_size, theirs.hidden_size),
        ("vocabulary size", config.vocab_size, theirs.vocab_size),
    ):
        if ours != found:
            raise FitError(
                f"this drafter does not fit the target {target.folder.name}: it was made for {what} {ours}, "
                f"the target has {found}; train one with moa-train, or pass the target it was made for as --model"
            )
    trained_for = config.target_fingerprint
    if trained_for and trained_for != target.fingerprint:
        return f"the drafter was trained for target {trained_for}, not for {target.fingerprint}: expect a lower tau"
    return ""


def drafter_fingerprint(folder: Path) -> str:
    """Return the identity of a checkpoint: SHA-256 over its configuration and weights, 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:32]


def check_sharpness(value: Any) -> None:
    """Raise a ConfigError unless ``value`` is a positive number."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"sharpness must be a positive number, not {value!r}")


def check_copied_exactly(target: Any) -> None:
    """Raise a ConfigError if the target's layers differ from :class:`moa_drafter.llama.DecoderLayer`."""
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
    """Return the size of an attention head, from a transformers configuration."""
    return getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads


def key_value_size(target: Any) -> int:
    """Return how many numbers the keys and values of a token have in one layer, from a transformers configuration."""
    return 2 * target.num_key_value_heads * head_size(target)


def rope_theta_of(target: Any) -> float:
    """Return the rotary base of a transformers configuration, of version 4 or 5."""
    parameters = getattr(target, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0)


#: By annotation: what a field must be in words, and whether a value of JSON is.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number from 0 on", lambda value: type(value) is int and value >= 0),
    "float": (
        "a positive number",
        lambda value: type(value) in (int, float) and value > 0 and math.isfinite(value),
    ),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("a string", lambda value: type(value) is str),
    "LayerDims": ("an object", lambda value: isinstance(value, Mapping)),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(type(number) is int for number in value),
    ),
}


def check_fields(config: type, raw: Mapping[str, Any], inside: str = "") -> None:
    """Check the fields that a file gives for a dataclass.

    Args:
        inside: the field whose object ``raw`` is; empty for the whole file.

    Raises:
        ConfigError: a field that is missing, unknown, or of another kind.
    """
    what, before = "not a drafter configuration: ", f"{inside}." if inside else ""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in raw:
        if name not in fields:
            raise ConfigError(f"{what}the field {before + name!r:.60} is unknown")
    for name, field in fields.items():
        if name not in raw:
            if field.default is dataclasses.MISSING:
                raise ConfigError(f"{what}the field {before + name!r} is missing")
            continue
        words, is_one = _KINDS[str(field.type)]
        if not is_one(raw[name]):
            raise ConfigError(f"{what}{before}{name} must be {words}, not {raw[name]!r:.60}")
