"""The description of a decoder from its config.json, or from the metadata of a GGUF file.

A family says how its layers are built; its numbers are in the configuration. A field that is neither read nor known to
be harmless may change the results, so the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moa_decoder.checkpoint_fields import LARGEST, MOST_LAYERS
from moa_decoder.errors import TargetError
from moa_decoder.matrix import Float32
from moa_decoder.spec import Activation, DecoderSpec, LayerSpec, Rotary
from moa_runtime.optional_deps import install_command

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
#: Positive numbers between this and its inverse are possible ones.
_SMALLEST = 1e-12
_MISSING: Any = object()


@dataclass(frozen=True)
class _Family:
    """How layers are built, beside the numbers of a configuration.

    Attributes:
        fields: read beside those of all families.
        named: sizes whose default in transformers is a number of its own. If one is missing, the target is refused.
        norms: before attention and feed-forward, after them, or both.
        norm_offset: added to the weights of all norms of a checkpoint.
        qkv_biases: whether these products always have biases; others have them if ``attention_bias`` says so.
        windows: the layers with a ``sliding_window``: all, or those that ``layer_types`` names.
        window: if the configuration does not mention one; null there means none.
        full_every: of how many layers the last has no window, if ``layer_types`` is missing; 0 for no windows.
        caps: soft caps of attention and logits if the configuration does not mention them.
        tied: whether the head is the embedding if the configuration does not say so.
        fused: whether a checkpoint has one matrix for queries, keys and values, and one for gate and up.
        scaled_embedding: whether embeddings are multiplied by the root of the hidden size.
        activation: if the configuration names none.
        approximates: whether ``gelu`` means ``gelu_tanh``, as in the first Gemma's configurations.
        theta: base of the rotary positions if the configuration has none; that of layers with a window.
        original_context: context before scaling if the configuration does not have it at its top, which comes before
            that of its rotary positions; None if those decide.
        interleaved: whether GGUF files have the pairs of a rotation as neighbours in queries and keys.
    """

    fields: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0
    query_key_norm: Literal["none", "head", "whole"] = "none"
    qkv_biases: bool = False
    windows: Literal["all", "layer_types"] = "layer_types"
    window: int | None = None
    full_every: int = 0
    caps: tuple[float, float] = (0.0, 0.0)
    tied: bool = False
    fused: bool = False
    scaled_embedding: bool = False
    activation: Activation = "silu"
    approximates: bool = False
    theta: tuple[float, float] = (10000.0, 10000.0)
    original_context: int | None = None
    interleaved: bool = False


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BIAS = "attention_bias"
_KV_HEADS, _SIZES = _names("num_key_value_heads"), _names("num_key_value_heads head_dim")
_WINDOWS = _names("sliding_window layer_types")
_QWEN = _WINDOWS | _names("use_sliding_window max_window_layers")
_GEMMA: dict[str, Any] = {
    "named": _SIZES,
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "activation": "gelu_tanh",
    "tied": True,
}
_GEMMA_WINDOWS: dict[str, Any] = {"norms": "both", "window": 4096, **_GEMMA}
_GEMMA_3 = _WINDOWS | _names("attention_bias hidden_activation query_pre_attn_scalar final_logit_softcapping")
_GEMMA_2 = _GEMMA_3 | {"attn_logit_softcapping"}
_FAMILIES = {
    "llama": _Family(_names("attention_bias mlp_bias"), interleaved=True),
    "mistral": _Family(_names("sliding_window"), _KV_HEADS, windows="all", window=4096),
    "ministral3": _Family(_names("sliding_window llama_4_scaling_beta"), _SIZES, windows="all"),
    "qwen2": _Family(_QWEN, _KV_HEADS, qkv_biases=True, window=4096),
    "qwen3": _Family(_QWEN | {_BIAS}, _SIZES, query_key_norm="head", window=4096),
    "olmo2": _Family(_names("attention_bias"), norms="after", query_key_norm="whole"),
    "gemma": _Family(_names("attention_bias hidden_activation"), approximates=True, **_GEMMA),
    "gemma2": _Family(_GEMMA_2, full_every=2, caps=(50.0, 30.0), **_GEMMA_WINDOWS),
    "gemma3_text": _Family(
        _GEMMA_3 | _names("sliding_window_pattern _sliding_window_pattern rope_local_base_freq"),
        query_key_norm="head",
        full_every=6,
        theta=(1e6, 1e4),
        **_GEMMA_WINDOWS,
    ),
    "smollm3": _Family(
        _WINDOWS | _names("attention_bias mlp_bias use_sliding_window no_rope_layers no_rope_layer_interval"),
        _KV_HEADS,
        theta=(2e6, 2e6),
        tied=True,
        interleaved=True,
    ),
    "phi3": _Family(_names("sliding_window partial_rotary_factor"), windows="all", fused=True, original_context=4096),
    "granite": _Family(
        _names("attention_bias mlp_bias")
        | _names("embedding_multiplier residual_multiplier attention_multiplier logits_scaling"),
        interleaved=True,
    ),
}
#: Fields that change no result: identity and types of the checkpoint, tokens, training, generation, other programs'.
_HARMLESS = _names("""
    architectures auto_map dtype torch_dtype transformers_version _name_or_path _model_name_or_path name_or_path
    is_llama_config torchscript pruned_heads use_bfloat16 tokenizer_class cache_implementation use_cache
    tie_word_embeddings pretraining_tp output_attentions output_hidden_states return_dict chunk_size_feed_forward
    max_window_layers
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id eod_token_id decoder_start_token_id prefix
    initializer_range attention_dropout residual_dropout hidden_dropout resid_pdrop embd_pdrop
    id2label label2id num_labels problem_type task_specific_params finetuning_task
    do_sample temperature top_k top_p typical_p min_length max_length num_beams num_beam_groups num_return_sequences
    repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size early_stopping
    transformers.js_config unsloth_version unsloth_fixed full_attn_mod interpolate_factor
    """)
#: Fields, of GGUF files too, whose false value changes results.
_ON = _names("is_causal attention.causal")
#: Fields of all families, of rotary positions of all, and of those of some.
_OF_ALL = _names("""
    model_type num_attention_heads num_key_value_heads hidden_size head_dim num_hidden_layers intermediate_size
    max_position_embeddings vocab_size rms_norm_eps hidden_act rope_theta rope_scaling rope_parameters
    original_max_position_embeddings
    """)
_ROPE = _names("""
    rope_type type rope_theta factor attention_factor original_max_position_embeddings max_position_embeddings
    low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor
    """)
_ROPE_OF_SOME = _names("partial_rotary_factor llama_4_scaling_beta")


def spec_of_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Describe the decoder of a config.json, in the spelling of transformers 4 or 5.

    Raises:
        TargetError: ``unsupported_target`` for a family or a field that graphs cannot be built for; ``missing_field``,
            ``wrong_type`` for a configuration that is none.
    """
    family = _family_of(config)
    fields = _Fields(config, family.fields | _OF_ALL)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads, head_dim = (
        fields.whole(name, _MISSING if name in family.named else other)
        for name, other in (("num_key_value_heads", heads), ("head_dim", hidden // heads))
    )
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", "a divisor of num_attention_heads")
    if head_dim % 2:
        raise fields.wrong("head_dim", "even")
    count, context = fields.whole("num_hidden_layers", most=MOST_LAYERS), fields.whole("max_position_embeddings")
    rotaries, context = _rotaries(fields, family, head_dim, context)
    layer = LayerSpec(
        heads,
        kv_heads,
        head_dim,
        intermediate_size=fields.whole("intermediate_size"),
        activation=_activation(fields, family),
        attention_scale=_attention_scale(fields, head_dim),
        rotary=rotaries[_FULL],
        norms_before=family.norms != "after",
        norms_after=family.norms != "before",
        query_key_norm=family.query_key_norm,
        attention_cap=fields.cap("attn_logit_softcapping", family.caps[0]),
        residual_scale=fields.number("residual_multiplier", 1.0),
        qkv_biases=fields.flag(_BIAS) or family.qkv_biases,
        out_bias=fields.flag(_BIAS),
        mlp_biases=fields.flag("mlp_bias"),
    )
    window = _window(fields, family)
    kinds, rotated = _kinds(fields, family, count, window), _rotated(fields, count)
    windows = {_FULL: None, _SLIDING: window if window is not None and window < context else None}
    possible = {
        (kind, rotates): replace(layer, rotary=rotaries[kind] if rotates else None, window=windows[kind])
        for kind in windows
        for rotates in (True, False)
    }
    spec = DecoderSpec(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        epsilon=fields.number("rms_norm_eps"),
        layers=tuple(possible[kind, rotates] for kind, rotates in zip(kinds, rotated, strict=True)),
        max_context=context,
        embedding_scale=hidden**0.5 if family.scaled_embedding else fields.number("embedding_multiplier", 1.0),
        logits_scale=1 / fields.number("logits_scaling", 1.0),
        logits_cap=fields.cap("final_logit_softcapping", family.caps[1]),
    )
    fields.refuse_unread()
    return spec


def norm_offset(config: Mapping[str, Any]) -> float:
    """Return what a checkpoint's norms lack: 1 if the family multiplies by ``1 + weight``, else 0."""
    return _family_of(config).norm_offset


def has_tied_head(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's head is its embedding."""
    tied = config.get("tie_word_embeddings")
    return _family_of(config).tied if tied is None else bool(tied)


def tensor_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a checkpoint's tensors by role: the names of :data:`moa_decoder.weights.LayerMatrix` and
    :data:`moa_decoder.weights.LayerVector` with ``{layer}`` in them, and ``embedding``, ``last_norm``, ``head``,
    ``head_bias``. Roles with the same tensor are parts of it: ``q``, ``k`` and ``v``, or ``gate`` and ``up``, in this
    order."""
    family = _family_of(config)
    q, k, v = ["qkv_proj"] * 3 if family.fused else ["q_proj", "k_proj", "v_proj"]
    gate, up = ["gate_up_proj"] * 2 if family.fused else ["gate_proj", "up_proj"]
    modules = {
        **{"q": f"self_attn.{q}", "k": f"self_attn.{k}", "v": f"self_attn.{v}", "out": "self_attn.o_proj"},
        **{"gate": f"mlp.{gate}", "up": f"mlp.{up}", "down": "mlp.down_proj"},
        **{"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm" if family.norms == "before" else "pre_feedforward_layernorm",
        "after_attention_norm": "post_attention_layernorm",
        "after_mlp_norm": "post_feedforward_layernorm",
    }
    names = {role: f"model.layers.{{layer}}.{module}.weight" for role, module in modules.items()}
    for role in ("q", "k", "v", "out", "gate", "up", "down"):
        names[f"{role}_bias"] = f"model.layers.{{layer}}.{modules[role]}.bias"
    top = {"embedding": "model.embed_tokens.weight", "last_norm": "model.norm.weight"}
    return {**names, **top, "head": "lm_head.weight", "head_bias": "lm_head.bias"}


# -- GGUF

#: Families by architecture of GGUF files.
_ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "olmo2", "gemma", "gemma2")}
_ARCHITECTURES |= {"gemma3": "gemma3_text", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3"}
#: Fields of config.json by key after the architecture.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
#: Keys that change no result, or that stand for something else here.
_IGNORED = frozenset({"vocab_size", "tensor_data_layout", "attention.value_length", "rope.dimension_count"})
_SHORT_FACTORS = "rope_factors_short.weight"
_SCALING_PREFIX = "rope.scaling."
_ATTENTION_FACTOR = f"{_SCALING_PREFIX}attn_factor"
_QUERY_BIAS, _OUT_BIAS = "blk.0.attn_q.bias", "blk.0.attn_output.bias"
#: Layers of the Gemma 2 and 3 models of 27 billion parameters, which alone scale attention by the size of the model
#: and not of a head. No metadata say so.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def interleaves(architecture: str) -> bool:
    """Whether GGUF files of an architecture have the two numbers of a rotation as neighbours in queries and keys."""
    return _FAMILIES[_ARCHITECTURES[architecture]].interleaved


def config_of_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], read: Callable[[str], Float32]
) -> dict[str, Any]:
    """Return the config.json of a GGUF file: the fields that :func:`spec_of_config` reads.

    Args:
        metadata: by key; lists of numbers as numpy arrays.
        shapes: of the tensors by name, the last dimension that of neighbours.
        read: returns a tensor of one dimension.

    Raises:
        TargetError: ``unsupported_target`` for an architecture that is not known.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise _unsupported(f"its architecture is {architecture!r:.60}")
    prefix, kind = f"{architecture}.", _ARCHITECTURES[architecture]
    own = {key[len(prefix) :]: _plain(value) for key, value in metadata.items() if key.startswith(prefix)}
    config: dict[str, Any] = {"model_type": kind}
    scaling: dict[str, Any] = {}
    for key, value in own.items():
        if key.startswith(_SCALING_PREFIX):
            name = key[len(_SCALING_PREFIX) :]
            scaling[_SCALING.get(name, name)] = value
        elif key not in _IGNORED:
            config[_KEYS.get(key, key)] = value
    scaling.pop("finetuned", None)
    if scaling.get("factor", 1) != 1:
        scaling.setdefault("rope_type", "linear")  # as llama.cpp does
    if _SHORT_FACTORS in shapes:
        scaling |= {"rope_type": "longrope", "short_factor": read(_SHORT_FACTORS).tolist()}
    scales = scaling.get("rope_type") or "none"
    if scales in ("none", "linear") and scaling.get("attention_factor", 1) != 1:  # llama.cpp reads it, transformers not
        raise _unsupported(f"it has an {_ATTENTION_FACTOR}, and rotary positions of the kind {scales!r}")
    if scales != "none":
        config["rope_scaling"] = scaling
    if "token_embd.weight" in shapes:
        config["vocab_size"] = int(shapes["token_embd.weight"][0])
    if _BIAS in _FAMILIES[kind].fields:
        config[_BIAS] = _QUERY_BIAS in shapes
        if config[_BIAS] != (_OUT_BIAS in shapes):
            raise _unsupported("only some of its attention's products have biases")
    fields, rest = _Fields(config, _OF_ALL), _Fields(own, _IGNORED, prefix)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    size = fields.whole("head_dim", hidden // heads)
    for name, value in (("head_dim", size), ("num_key_value_heads", heads)):
        if name in _FAMILIES[kind].named:  # llama.cpp derives them from the others
            config.setdefault(name, value)
    if rest.whole("attention.value_length", size) != size:
        raise _unsupported("its keys and values differ in size")
    if (rotated := rest.whole("rope.dimension_count", size)) != size:
        config["partial_rotary_factor"] = rotated / size
    if architecture in _LARGEST_GEMMA:
        largest = config.get("num_hidden_layers") == _LARGEST_GEMMA[architecture]
        config["query_pre_attn_scalar"] = hidden // heads if largest else size
    return config


def spec_of_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], read: Callable[[str], Float32]
) -> DecoderSpec:
    """Describe the decoder of a GGUF file; arguments and errors as of :func:`config_of_gguf` and
    :func:`spec_of_config`."""
    spec = replace(spec_of_config(config_of_gguf(metadata, shapes, read)), head_bias="output.bias" in shapes)
    if "rope_freqs.weight" not in shapes:
        return spec
    factors = read("rope_freqs.weight").astype(np.float64)  # Llama 3's scaling, by which frequencies are divided
    slowed = {rotary: _slowed(rotary, factors) for rotary in {layer.rotary for layer in spec.layers}}
    return replace(spec, layers=tuple(replace(layer, rotary=slowed[layer.rotary]) for layer in spec.layers))


def _plain(value: Any) -> Any:
    """Return a value of metadata as JSON has it; a list of equal numbers, such as one a layer, as one number."""
    if not isinstance(value, np.ndarray):
        return value
    numbers = value.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _slowed(rotary: Rotary | None, factors: NDArray[np.float64]) -> Rotary | None:
    if rotary is None:
        return None
    if len(factors) != len(rotary.frequencies) or not (factors > 0).all():
        raise _unsupported("its rope_freqs do not fit its heads")
    return replace(rotary, frequencies=rotary.frequencies / factors)


# -- parts of a configuration


def _family_of(config: Mapping[str, Any]) -> _Family:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise _unsupported(f"its model_type is {kind!r:.60}")
    return _FAMILIES[kind]


def _unsupported(why: str) -> TargetError:
    return TargetError(
        f"this target is not supported without torch, nor in int8 or int4: {why}; {install_command('torch')}",
        code="unsupported_target",
    )


class _Fields:
    """A configuration; every field must be read, harmless, or off.

    Args:
        known: names of fields that are read. Others are taken for absent, because transformers does not read them
            either, and refused in the end.
        inside: the field whose object this is, with a dot; empty for the whole configuration.
    """

    def __init__(self, values: Mapping[str, Any], known: frozenset[str], inside: str = "") -> None:
        self._values, self._known, self._inside = values, known, inside

    def has(self, name: str) -> bool:
        """Whether the family has the field."""
        return name in self._known

    def any(self, name: str, default: Any = None) -> Any:
        """Return a value; the default if it is missing or null."""
        value = self._values.get(name) if name in self._known else None
        if value is None and default is _MISSING:
            raise TargetError(
                f"the target's configuration lacks {self._inside}{name}: fetch the target again", code="missing_field"
            )
        return default if value is None else value

    def whole(self, name: str, default: Any = _MISSING, most: int = LARGEST) -> int:
        value = self.any(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(name, f"a whole number in 1..{most}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self.any(name, default)
        if not _is_positive(value):
            raise self.wrong(name, "a positive number")
        return float(value)

    def is_off(self, name: str, default: Any) -> bool:
        """Whether a value is null or 0; the default stands for a missing one, which is not the same as null."""
        return not self.has(name) or not self._values.get(name, default)

    def cap(self, name: str, default: float) -> float:
        """Return a soft cap, 0 for none."""
        return 0.0 if self.is_off(name, default) else self.number(name, default)

    def flag(self, name: str) -> bool:
        value = self.any(name, False)
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def list_of(self, name: str, count: int, allowed: Sequence[Any]) -> list[Any] | None:
        """Return the first ``count`` values of a list, all ``allowed`` ones; None if it is missing."""
        value = self.any(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < count or any(each not in allowed for each in value):
            raise self.wrong(name, f"a list of {count} values, each of them {' or '.join(map(str, allowed))}")
        return value[:count]

    def wrong(self, name: str, expected: str) -> TargetError:
        return TargetError(
            f"{self._inside}{name} of the target's configuration must be {expected}, not "
            f"{self._values.get(name)!r:.60}: fetch the target again",
            code="wrong_type",
        )

    def refuse_unread(self) -> None:
        """Raise TargetError for fields that may change the results."""
        on = {name for name, value in self._values.items() if value is not None and value is not (name in _ON)}
        if unknown := sorted(f"{self._inside}{name}" for name in on - self._known - _HARMLESS):
            raise _unsupported(f"its configuration has {', '.join(unknown)}")


def _attention_scale(fields: _Fields, head_dim: int) -> float:
    if fields.has("attention_multiplier"):
        return fields.number("attention_multiplier", 1.0)
    scalar = 256 if fields.has("query_pre_attn_scalar") else head_dim
    return 1 / math.sqrt(fields.number("query_pre_attn_scalar", scalar))


def _activation(fields: _Fields, family: _Family) -> Activation:
    reads_act = family.approximates or not fields.has("hidden_activation")
    name = fields.any("hidden_act" if reads_act else "hidden_activation") or family.activation
    if name == "gelu" and family.approximates:
        name = "gelu_tanh"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise _unsupported(f"its activation is {name!r:.60}")
    return _ACTIVATIONS[name]


def _window(fields: _Fields, family: _Family) -> int | None:
    """Return the window of the layers with one."""
    if fields.has("use_sliding_window") and not fields.flag("use_sliding_window"):
        return None
    return None if fields.is_off("sliding_window", family.window) else fields.whole("sliding_window", family.window)


def _kinds(fields: _Fields, family: _Family, count: int, window: int | None) -> list[str]:
    """Return the kind of each layer's attention."""
    kinds = fields.list_of("layer_types", count, (_FULL, _SLIDING))
    if window is None or family.windows == "all":
        return [_FULL if window is None else _SLIDING] * count
    if kinds is not None:
        return kinds
    if family.full_every:
        pattern = fields.any("sliding_window_pattern", family.full_every)
        every = pattern if type(pattern) is int and pattern > 0 else family.full_every
        return [_SLIDING if (index + 1) % every else _FULL for index in range(count)]
    if fields.has("no_rope_layers"):
        return [_FULL if rotates else _SLIDING for rotates in _rotated(fields, count)]
    first = fields.any("max_window_layers", 28)
    if type(first) is not int:
        raise fields.wrong("max_window_layers", "a whole number")
    return [_SLIDING if index >= first else _FULL for index in range(count)]


def _rotated(fields: _Fields, count: int) -> list[bool]:
    """Return whether each layer rotates queries and keys."""
    if not fields.has("no_rope_layers"):
        return [True] * count
    rotated = fields.list_of("no_rope_layers", count, (0, 1))  # 1 for those that do
    if rotated is not None:
        return [bool(each) for each in rotated]
    every = fields.whole("no_rope_layer_interval", 4)
    return [bool((index + 1) % every) for index in range(count)]


def _rotaries(fields: _Fields, family: _Family, head_dim: int, context: int) -> tuple[dict[str, Rotary], int]:
    """Return the rotary positions by kind of layer, and the longest context."""
    scaling, parameters = fields.any("rope_scaling"), fields.any("rope_parameters")
    given: Any = scaling or parameters or {}
    if not isinstance(given, Mapping):
        raise fields.wrong("rope_parameters", "an object")
    if fields.has("llama_4_scaling_beta") and given.get("llama_4_scaling_beta") is None:
        raise _unsupported("its configuration lacks rope_parameters.llama_4_scaling_beta")  # its class has another one
    original = fields.any("original_max_position_embeddings", family.original_context)
    partial = fields.any("partial_rotary_factor")
    known = _ROPE | family.fields & _ROPE_OF_SOME

    def rotary(own: Any, theta: Any) -> tuple[Rotary, int]:
        if not isinstance(own, Mapping):
            raise fields.wrong("rope_parameters", "an object")
        values = dict(own)
        if original is not None:  # transformers prefers this field to the object's, and the object's to the next one
            values["original_max_position_embeddings"] = original
        if partial is not None and own.get("partial_rotary_factor") is None:
            values["partial_rotary_factor"] = partial
        values["rope_theta"] = own.get("rope_theta") or theta
        kind = values.get("rope_type") or values.get("type") or "default"
        if family.fused and kind in ("su", "yarn"):
            kind = "longrope"  # names of Phi 3's first configurations
        if values.get("partial_rotary_factor") == 1:
            del values["partial_rotary_factor"]
        return _rotary(_Fields(values, known, "rope_parameters."), kind, head_dim, context)

    theta, local = fields.any("rope_theta", family.theta[0]), family.theta[1]
    if not fields.has("rope_local_base_freq"):
        full, limit = rotary(given, theta)
        return {_FULL: full, _SLIDING: full}, limit
    if scaling and parameters:
        raise _unsupported("its configuration has rope_scaling beside rope_parameters")
    if given.keys() & {_FULL, _SLIDING}:
        _check_nested(given, original)
    elif scaling or not given:  # transformers 4: scaled in full layers only
        given = {_FULL: given}
    else:
        raise _unsupported("its rope_parameters are not by kinds of layers")  # transformers ignores them
    full, limit = rotary(given.get(_FULL) or {}, theta)
    sliding, _ = rotary(given.get(_SLIDING) or {}, fields.any("rope_local_base_freq", local))
    return {_FULL: full, _SLIDING: sliding}, limit


def _check_nested(given: Mapping[str, Any], original: Any) -> None:
    """Refuse fields that transformers takes from another place than here for rotary positions by kinds of layers."""
    if others := sorted(given.keys() - {_FULL, _SLIDING}):
        raise _unsupported(f"its configuration has rope_parameters.{others[0]:.60}")
    if original is not None:
        raise _unsupported("its configuration has original_max_position_embeddings beside rope_parameters")
    if any(isinstance(own, Mapping) and own.get("truncate") is not None for own in given.values()):
        raise _unsupported("its configuration has rope_parameters of layers with truncate")


def rotary_of(parameters: Mapping[str, Any], head_dim: int, context: int) -> Rotary:
    """Compute the rotary positions of transformers' ``rope_parameters``, or of ``rope_scaling`` with a ``rope_theta``.

    Args:
        context: positions that the model was made for.

    Raises:
        TargetError: as :func:`spec_of_config`; ``unsupported_target`` also for positions that change with the context.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "longrope":
        raise _unsupported(f"its rotary positions are of the kind {kind!r}")
    return _rotary(_Fields(parameters, _ROPE, "rope_parameters."), kind, head_dim, context)[0]


def _rotary(fields: _Fields, kind: Any, head_dim: int, context: int) -> tuple[Rotary, int]:
    """Compute frequencies as transformers does (modeling_rope_utils.py), in float64.

    Returns:
        the rotary positions, and the longest context: that before the frequencies of all tokens change (longrope).
    """
    size = int(head_dim * fields.number("partial_rotary_factor", 1.0))
    theta = fields.number("rope_theta")
    original = fields.whole("original_max_position_embeddings", context)
    fields.refuse_unread()
    if size % 2 or not 2 <= size <= head_dim:
        raise fields.wrong("partial_rotary_factor", "one that leaves an even number of rotated numbers")
    if theta <= 1 or original < 2:
        raise fields.wrong("rope_theta" if theta <= 1 else "original_max_position_embeddings", "greater than 1")
    frequencies = theta ** -(np.arange(0, size, 2) / size)
    growth = fields.number("llama_4_scaling_beta") if fields.any("llama_4_scaling_beta") else 0.0
    plain = Rotary(frequencies, query_growth=growth, original_context=original if growth else 1)
    if kind == "default":
        return plain, context
    if kind == "linear":
        return replace(plain, frequencies=frequencies / fields.number("factor")), context
    if kind == "llama3":
        return replace(plain, frequencies=_llama3(fields, frequencies, original)), context
    if kind == "yarn":
        factor = fields.number("factor", context / original)
        slow = _yarn_slowed(fields, size, theta, original)
        frequencies = frequencies * (1 - slow) + frequencies / factor * slow
        return replace(plain, frequencies=frequencies, factor=_yarn_factor(fields, factor)), context
    if kind == "longrope":
        short = fields.any("short_factor", _MISSING)
        if not isinstance(short, list) or len(short) != size // 2 or not all(_is_positive(each) for each in short):
            raise fields.wrong("short_factor", f"a list of {size // 2} positive numbers")
        ratio = fields.number("factor", context / original)
        longer = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        factor = fields.number("attention_factor", longer)
        return replace(plain, frequencies=frequencies / np.array(short), factor=factor), min(context, original)
    raise _unsupported(f"its rotary positions are of the kind {kind!r:.60}")


def _llama3(fields: _Fields, frequencies: NDArray[np.float64], original: int) -> NDArray[np.float64]:
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.wrong("high_freq_factor", "greater than low_freq_factor")
    turns = original * frequencies / (2 * np.pi)  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn_slowed(fields: _Fields, size: int, theta: float, original: int) -> NDArray[np.float64]:
    """Return how much of the scaling each frequency gets (arXiv 2309.00071), ``[size / 2]``."""

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fields.number("beta_fast", 32.0)), dimension(fields.number("beta_slow", 1.0))
    if fields.any("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)


def _yarn_factor(fields: _Fields, factor: float) -> float:
    def of(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    both = fields.any("mscale"), fields.any("mscale_all_dim")
    default = of(fields.number("mscale")) / of(fields.number("mscale_all_dim")) if all(both) else of(1.0)
    return fields.number("attention_factor", default)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and _SMALLEST <= value <= 1 / _SMALLEST
