"""Configurations of all drafters, stored as ``config.json`` beside the weights, and the files of a checkpoint.

Needs no torch, so that a command line can find a checkpoint at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_decoder.errors import TargetError
from moa_runtime.checked_file import read_checked
from moa_runtime.errors import MoaError

if TYPE_CHECKING:
    from typing_extensions import Self

    from moa_decoder.spec import Rotary

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
#: Weights of older published heads, in torch's own format.
TORCH_WEIGHTS_FILE = "pytorch_model.bin"
#: Folder of a training run's checkpoint.
CHECKPOINT_FOLDER = "drafter"
#: Bytes of a drafter's weights.
LARGEST_WEIGHTS = 1 << 34
#: Largest width accepted for a layer; no model has a wider one.
_WIDEST = 1 << 17
#: Largest whole number in a configuration.
_LARGEST = (1 << 31) - 1
#: Why a checkpoint, training run or configuration of version 0.1.0 cannot be used (code ``unsupported``).
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
        for name, value in vars(self).items():
            if not isinstance(value, int) or not 1 <= value <= _WIDEST:
                raise ConfigError(f"{name} must lie in 1..{_WIDEST}, not {value!r:.60}", code="out_of_range")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads", code="inconsistent")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, not {self.head_dim}", code="out_of_range")


@dataclass(frozen=True)
class Reads:
    """The target's states that a drafter reads.

    Attributes:
        kv_layers: layers, counted from 0, whose keys and values it reads.
        inner_layers: layers whose output it reads; the normed output of the last one is always given.
    """

    kv_layers: tuple[int, ...] = ()
    inner_layers: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is read."""
        return bool(self.kv_layers or self.inner_layers)


class JsonConfig:
    """Base of the dataclasses that are stored as ``config.json``."""

    def to_json(self) -> str:
        """Return all fields as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Self:
        """Parse what :meth:`to_json` wrote, also in version 0.1.0, which had ``first_layers``. Raises ConfigError for
        unknown, missing or wrong fields, and for copies of the target's first layers."""
        values = dict(raw)
        if values.pop("first_layers", 0) != 0:
            raise ConfigError(FIRST_LAYERS, code="unsupported")
        check_fields(cls, values)
        for field in dataclasses.fields(cls):
            if field.type == "LayerDims":
                check_fields(LayerDims, raw[field.name], field.name)
                values[field.name] = LayerDims(**raw[field.name])
            elif field.type == "tuple[int, ...]":
                values[field.name] = tuple(raw[field.name])
        return cls(**values)

    def _check_draft_vocabulary(self) -> None:
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size must lie in 1..{self.vocab_size}", code="out_of_range")


@dataclass(frozen=True)
class DrafterConfig(JsonConfig):
    """Tensor shapes of a Mixture of Attentions drafter.

    Attributes:
        decoder: shape of the self-attention and of the cross-attention layer.
        layer_attention: shape of the layer self-attention, as wide as the target's key-value vector.
        lsa_layers: target layers that it sees; the published drafter sees all.
        target_layers: number of copies of the target's last layers in the device half, after the cross-attention. They
            are frozen and no part of a checkpoint, unless ``trained_target_layers``.
        sharpness: see :meth:`moa_drafter.drafter.Drafter.sharpen`; it fixes no shape.
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
        self._check_draft_vocabulary()
        if self.layer_attention.hidden_size != self.target_kv_size:
            raise ConfigError("layer_attention.hidden_size must equal target_kv_size", code="inconsistent")
        last = self.target_num_layers - 1
        if not self.lsa_layers or not all(0 <= i <= last for i in self.lsa_layers):
            raise ConfigError(f"lsa_layers must name layers 0..{last} of the target", code="out_of_range")
        if self.architecture != "moa":
            raise ConfigError(f"architecture must be 'moa', not {self.architecture!r}", code="unknown_arch")
        count = self.target_layers
        if not isinstance(count, int) or not 0 <= count <= last:
            raise ConfigError(f"target_layers must lie in 0..{last}, not {count!r}", code="out_of_range")
        if self.trained_target_layers and not count:
            raise ConfigError("no layer of the target to train: set target_layers", code="inconsistent")
        if count and not self.final_norm:
            raise ConfigError("target_layers need the norm that follows them: set final_norm", code="inconsistent")
        kv_size = 2 * self.decoder.num_kv_heads * self.decoder.head_dim
        if count and kv_size != self.target_kv_size:
            raise ConfigError("target_layers need a decoder of the target's shape", code="inconsistent")

    @property
    def step_layers(self) -> int:
        """Decoder layers that a drafting step runs."""
        return 2 + self.target_layers

    @property
    def kv_heads(self) -> int:
        """Heads of keys, or of values, in a cache entry and in a memory row: those of the self- or cross-attention,
        then of the ``target_layers``."""
        return (1 + self.target_layers) * self.decoder.num_kv_heads

    @property
    def tail_layers(self) -> tuple[int, ...]:
        """The target's layers that follow the cross-attention, counted from 0."""
        return tuple(range(self.target_num_layers - self.target_layers, self.target_num_layers))

    @property
    def row_reads(self) -> Reads:
        """Keys and values of the layers that the layer self-attention reads, then of the tail's."""
        return Reads(kv_layers=self.lsa_layers + self.tail_layers)


@dataclass(frozen=True, kw_only=True)
class RivalConfig(JsonConfig):
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
        self._check_draft_vocabulary()

    @property
    def row_reads(self) -> Reads:
        """The states of the target that the rows for the device are made of; an empty set if none are sent."""
        return Reads()

    @classmethod
    def like(cls, config: DrafterConfig, **own: Any) -> Self:
        """Make a configuration for the target of a Mixture of Attentions drafter.

        Args:
            own: the architecture's own fields.
        """
        names = {field.name for field in dataclasses.fields(RivalConfig)} - {"architecture"}
        return cls(**{name: getattr(config, name) for name in names}, **own)


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


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(RivalConfig):
    """See :mod:`moa_drafter.architectures.eagle3`. A published head does not name its target's sizes: number of layers
    and ``target_kv_size`` are 0, until :meth:`for_layers` sets the former. ``rope_theta`` is not read.

    Attributes:
        aux_layers: the target's layers whose *inputs* are read, counted from 0; empty for those that the paper's
            authors read, which depend on the target's number of layers.
        rope: parameters of the rotary positions, as in transformers' ``rope_parameters``; ``rope_theta`` is in it.
        norm_before_fc: whether a norm over all inputs together precedes ``fc``.
        fc_norm: whether a norm over each input precedes ``fc``.
        norm_before_residual: whether the layer's residual is the normed feature.
        norm_output: whether the estimate that replaces a feature is normed.
        qk_norm: whether queries and keys are normed head by head (Qwen 3).
        own_embedding: whether the checkpoint has a token embedding; else the target's is used.
    """

    aux_layers: tuple[int, ...] = ()
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    own_embedding: bool = False
    architecture: str = "eagle3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder.hidden_size % 2:
            raise ConfigError("hidden_size must be even, for a feature is sent in halves", code="out_of_range")
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm exclude each other", code="inconsistent")
        _ = self.rotary

    @staticmethod
    def usual_aux_layers(count: int) -> tuple[int, ...]:
        """Return the layers of a target of ``count`` whose inputs the paper's authors read."""
        return 2, count // 2, count - 3

    def for_layers(self, count: int) -> Eagle3Config:
        """Return the configuration for a target of ``count`` layers. Raises FitError if it lacks one that is read."""
        read = self.aux_layers or self.usual_aux_layers(count)
        if not all(1 <= layer < count for layer in read):
            raise FitError(
                f"this drafter reads layers that a target of {count} layers has not: pass the target it was made for "
                "as --model",
                code="wrong_target",
            )
        return dataclasses.replace(self, aux_layers=read, target_num_layers=count)

    @property
    def kv_heads(self) -> int:
        """Heads of the layer's keys, or values."""
        return self.decoder.num_kv_heads

    @property
    def row_shape(self) -> tuple[int, int]:
        """Of half a feature, see :func:`moa_runtime.backends.eagle3.halves_of`."""
        from moa_runtime.backends.eagle3 import halves_of  # late: drafters' names need no numpy

        return halves_of(self.decoder.hidden_size, self.decoder.num_kv_heads)

    @property
    def step_layers(self) -> int:
        """Decoder layers that a drafting step runs."""
        return 1

    @property
    def inputs(self) -> int:
        """Number of the target's hidden states that a feature is made of."""
        return len(self.aux_layers) or 3

    @property
    def rotary(self) -> Rotary:
        """The rotary positions. Raises ConfigError for kinds that are not computed."""
        from moa_decoder.families import rotary_of

        try:
            return rotary_of(self.rope, self.decoder.head_dim, self.max_position_embeddings)
        except TargetError as error:
            kind = self.rope.get("rope_type") or self.rope.get("type") or "default"
            raise ConfigError(
                f"its rotary positions of the kind {kind!r:.60} are not computed with the fields that it has",
                code="unsupported",
            ) from error

    @property
    def row_reads(self) -> Reads:
        """The outputs of the layers before ``aux_layers``, which :meth:`for_layers` must have set."""
        assert self.aux_layers
        return Reads(inner_layers=tuple(layer - 1 for layer in self.aux_layers))


@dataclass(frozen=True, kw_only=True)
class EarlyExitConfig(TokenConfig):
    """See :mod:`moa_drafter.architectures.early_exit`: ``exit_layer`` is the number of the target's layers below the
    exit."""

    exit_layer: int = 5
    architecture: str = "early-exit"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.exit_layer <= self.target_num_layers:
            raise ConfigError(f"exit_layer must lie in 1..{self.target_num_layers}", code="out_of_range")

    @property
    def step_layers(self) -> int:
        return self.exit_layer + 1


@dataclass(frozen=True, kw_only=True)
class IndependentConfig(TokenConfig):
    """See :mod:`moa_drafter.architectures.independent`: ``layers`` decoder layers; two are as many parameters as MoA's
    self- and cross-attention layer."""

    layers: int = 2
    architecture: str = "independent"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise ConfigError(f"layers must be at least 1, not {self.layers}", code="out_of_range")

    @property
    def step_layers(self) -> int:
        return self.layers


#: Classes of the configurations by the name in ``moa-train --arch`` and ``config.json``.
CONFIGS: Mapping[str, type[DrafterConfig] | type[RivalConfig]] = {
    "moa": DrafterConfig,
    "eagle3": Eagle3Config,
    "early-exit": EarlyExitConfig,
    "independent": IndependentConfig,
}


def check_architecture(name: object) -> None:
    """Raise ConfigError if no drafter has this name, or none any more."""
    if name == "eagle":
        raise ConfigError(
            "heads of the architecture eagle are no longer supported: train one with moa-train --arch eagle3",
            code="unsupported",
        )
    if not isinstance(name, str) or name not in CONFIGS:
        raise ConfigError(f"unknown architecture {name!r:.60}: known are {', '.join(CONFIGS)}", code="unknown_arch")


def config_of(raw: Mapping[str, Any]) -> DrafterConfig | RivalConfig:
    """Parse a ``config.json`` of any architecture. Raises ConfigError if it is none of ours."""
    name = raw.get("architecture", "moa")
    check_architecture(name)
    return CONFIGS[name].from_mapping(raw)


def config_for_target(
    target: Any,
    *,
    draft_vocab_size: int,
    lsa_layers: int = 6,
    target_layers: int = 0,
    trained_target_layers: bool = False,
    target_fingerprint: str = "",
) -> DrafterConfig:
    """Make a configuration with the shape of one target layer, so that a drafter can start from its weights. Raises
    ConfigError for a number out of range.

    Args:
        target: the target's transformers configuration.
        draft_vocab_size: rows of the draft head, at most the target's vocabulary.
        lsa_layers: number of target layers, evenly spaced and ending with the last, that are seen.
        target_layers, trained_target_layers: see :class:`DrafterConfig`.
        target_fingerprint: see :func:`moa_drafter.target_facts.target_fingerprint`.
    """
    head_dim, kv_size, kv_heads = head_size(target), key_value_size(target), _usual_layer(target).num_key_value_heads
    layers, readable = target.num_hidden_layers, kv_layers(target)
    if not readable:
        text = "a drafter reads keys and values of one size, the target's layers have none: use n-gram drafts"
        raise ConfigError(text, code="unsupported_target")
    seen, rope = min(lsa_layers, len(readable)), next(ropes(target))
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
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_feed_forward_size(target),
        ),
        layer_attention=LayerDims(
            hidden_size=kv_size,
            num_heads=2 * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=2 * kv_size,
        ),
        lsa_layers=tuple(readable[-1 - (i * len(readable)) // seen] for i in range(seen))[::-1],
        rope_theta=float(rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0),
        rms_norm_eps=next((float(value) for name in _EPSILONS if (value := getattr(target, name, None))), 1e-5),
        max_position_embeddings=target.max_position_embeddings,
        target_fingerprint=target_fingerprint,
        target_layers=target_layers,
        trained_target_layers=trained_target_layers,
    )


def check_fit(config: DrafterConfig | RivalConfig, target: Any) -> str:
    """Check that a drafter was made for a target; raises FitError, which names the first size that differs.

    Args:
        target: a :class:`moa_drafter.target.Target`, or its ``folder``, ``config`` and ``fingerprint``.

    Returns:
        a warning if the shapes fit but the fingerprints differ (such as the Hub's copy and the wheel's), which costs
        accepted tokens but no correctness; otherwise the empty string.
    """
    theirs = target.config
    compared = [
        ("number of layers", config.target_num_layers, theirs.num_hidden_layers),
        ("numbers of keys and values per token and layer", config.target_kv_size, key_value_size(theirs)),
        ("hidden size", config.decoder.hidden_size, theirs.hidden_size),
        ("vocabulary size", config.vocab_size, theirs.vocab_size),
    ]
    if isinstance(config, Eagle3Config):
        config.for_layers(theirs.num_hidden_layers)
        del compared[:2]
    for what, ours, found in compared:
        if ours != found:
            raise FitError(
                f"this drafter does not fit the target: it was made for {what} {ours}, "
                f"the target has {found}; train one with moa-train, or pass the target it was made for as --model",
                code="wrong_target",
            )
    trained_for = config.target_fingerprint
    if trained_for and trained_for != target.fingerprint:
        return f"the drafter was trained for target {trained_for}, not for {target.fingerprint}: expect a lower tau"
    return ""


def drafter_fingerprint(folder: Path) -> str:
    """Return the identity of a checkpoint: SHA-256 over its configuration and weights, 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, weights_file(folder)):
        digest.update(read_checked(path, LARGEST_WEIGHTS))
    return digest.hexdigest()[:32]


def weights_file(folder: Path) -> Path:
    """Return the file with a checkpoint's weights; ``model.safetensors`` if there is none."""
    in_torch = folder / TORCH_WEIGHTS_FILE
    return in_torch if in_torch.is_file() and not (folder / WEIGHTS_FILE).is_file() else folder / WEIGHTS_FILE


def check_copied_exactly(target: Any) -> None:
    """Raise a ConfigError if the target's layers differ from :class:`moa_drafter.llama.DecoderLayer`."""
    rope = getattr(target, "rope_parameters", None) or {}
    kind, activation = rope.get("rope_type", "default"), getattr(target, "hidden_act", "silu")
    advice = "use 0 target layers, another architecture than early-exit, another offline model"
    if unknown := unknown_fields(target):
        raise ConfigError(
            f"layers cannot be copied from a target whose configuration has {', '.join(unknown)}: {advice}",
            code="unsupported_target",
        )
    if kind != "default" or activation != "silu":
        raise ConfigError(
            "layers can be copied from a target with plain rotary positions and SwiGLU, this one has "
            f"{kind!r} positions and {activation!r}: {advice}",
            code="unsupported_target",
        )


#: In transformers' configurations: kinds of layers with keys and values, the size of a feed-forward network, the norms'
#: epsilon.
_ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid"})
_FEED_FORWARD = ("intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size", "hidden_size")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")


def _usual_layer(target: Any) -> Any:
    """Return the configuration of one of those layers that a drafter reads."""
    if not getattr(target, "is_heterogeneous", False):
        return target
    kinds = list(getattr(target, "layer_types", None) or ())  # Gemma 4: more of its layers have a window
    return target.per_layer_config[kinds.index("sliding_attention") if "sliding_attention" in kinds else 0]


def head_size(target: Any) -> int:
    """Return the size of an attention head, from a transformers configuration."""
    own = _usual_layer(target)
    return getattr(own, "head_dim", None) or target.hidden_size // target.num_attention_heads


def _feed_forward_size(target: Any) -> int:
    size = next(size for name in _FEED_FORWARD if (size := getattr(_usual_layer(target), name, None)))
    return int(size[0] if isinstance(size, list) else size)  # Gemma 3n lists those of all layers


def kv_layers(target: Any) -> list[int]:
    """Return the numbers of the layers with keys and values of their own, of the shape that most have, from a
    transformers configuration; none for latent attention, whose keys are longer than values."""
    if getattr(target, "kv_lora_rank", None):
        return []
    count = target.num_hidden_layers
    kinds = list(getattr(target, "layer_types", None) or ["full_attention"] * count)[:count]
    kept = {"sliding_attention"} if getattr(target, "is_heterogeneous", False) else _ATTENDING
    own = count - (getattr(target, "num_kv_shared_layers", None) or 0)
    return [index for index, kind in enumerate(kinds[:own]) if kind in kept]


def key_value_size(target: Any) -> int:
    """Return how many numbers the keys and values of a token have in one layer, from a transformers configuration."""
    return 2 * _usual_layer(target).num_key_value_heads * head_size(target)


#: Description of a field's kind and check of its JSON value, by annotation.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (f"a whole number in 0..{_LARGEST}", lambda value: type(value) is int and 0 <= value <= _LARGEST),
    "float": ("a positive number", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max),
    "bool": ("true or false", lambda value: type(value) is bool),
    "str": ("a string", lambda value: type(value) is str),
    **dict.fromkeys(("LayerDims", "Mapping[str, Any]"), ("an object", lambda value: isinstance(value, Mapping))),
    "tuple[int, ...]": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(type(one) is int and abs(one) <= _LARGEST for one in value),
    ),
}


def check_fields(config: type, raw: Mapping[str, Any], inside: str = "") -> None:
    """Check the fields that a file gives for a dataclass. Raises ConfigError if one is missing, unknown or of another
    kind. ``inside`` is the field whose object ``raw`` is; empty for the whole file."""
    what, before = "not a drafter configuration: ", f"{inside}." if inside else ""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in sorted(raw.keys() - fields.keys()):
        raise ConfigError(f"{what}the field {before + name!r:.60} is unknown", code="unknown_field")
    for name, field in fields.items():
        words, is_one = _KINDS[str(field.type)]
        if name in raw and not is_one(raw[name]):
            raise ConfigError(f"{what}{before}{name} must be {words}, not {raw[name]!r:.60}", code="wrong_type")
        if name not in raw and field.default is dataclasses.MISSING:
            raise ConfigError(f"{what}the field {before + name!r} is missing", code="missing_field")


#: Fields that do not change what a layer computes, beside those of Llama. Sizes and biases are seen in the modules,
#: windows bound the context, dropout is of no concern in inference.
_HARMLESS = frozenset(
    {
        "attention_out_bias",
        "original_max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "residual_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "eod_token_id",
    }
)
#: Fields of the rotary positions; the target's own module, which computes them, reads all.
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
    """Fields by which a target may compute something else than Llama: those that its class declares beside Llama's and
    that are not None. A model reads no field that its class does not declare.

    Args:
        config: transformers' configuration.
        known_rope: further fields of the rotary positions that the caller computes with.
    """
    from transformers import LlamaConfig

    names, of_llama = ({field.name for field in dataclasses.fields(each)} for each in (config, LlamaConfig))
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    found = [name for name in sorted(names - of_llama - _HARMLESS) if getattr(config, name) is not None]
    unread = sorted(rope.keys() - _KNOWN_ROPE - set(known_rope))
    found += [f"rope_parameters.{name}" for name in unread if rope[name] is not None]
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return found + [f"layer_types: {kind}" for kind in sorted(kinds)]


def original_contexts(config: Any) -> set[int]:
    """Return the lengths after which rotary positions or attention are computed in another way."""
    name = "original_max_position_embeddings"
    return {int(rope[name]) for rope in ropes(config) if name in rope}


def longest_context(config: Any, *, windows: bool = False) -> tuple[int, str]:
    """Return the longest context of a target in tokens, and the reason for the limit.

    The original context of a longrope is a limit, because the keys of all earlier tokens would have to be computed
    again after it.

    Args:
        windows: whether layers with a window do not see the tokens before it, although caches keep every token; else
            the window is a limit too.
    """
    limits = [(int(config.max_position_embeddings), "its max_position_embeddings")]
    for name in () if windows else ("sliding_window", "attention_chunk_size"):
        if window := getattr(config, name, None):
            limits.append((int(window), f"some layers look no further back (its {name})"))
    if any(rope.get("rope_type") == "longrope" for rope in ropes(config)):
        reason = "after these its rotary positions change for all tokens (longrope)"
        limits += [(length, reason) for length in original_contexts(config)]
    return min(limits)


def ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of a target's rotary positions; some families have one set for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    yield from nested or [parameters]
