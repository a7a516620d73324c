"""Published EAGLE-3 heads: recognition of their two formats, and the tensors under one set of names. Needs no torch.

``speculators`` (github.com/vllm-project/speculators, ``models/eagle3``) writes ``speculators_model_type: eagle3`` and
the decoder layer as ``layers.0``; the paper's authors (github.com/SafeAILab/EAGLE, ``model/cnets.py``), SpecForge and
AngelSlim write the configuration of a Llama and the layer as ``midlayer``. The layer is ``layer`` here, and
``draft_to_target`` takes the place of ``d2t``, whose entry i is to be added to i, and of ``t2d``.
"""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moa_decoder.weight_faults import WEIGHTS_DIFFER, Shape
from moa_drafter.config import ConfigError, Eagle3Config
from moa_runtime.optional_deps import install_command

_PREFIXES = ("midlayer.", "layers.0.")
_LAYER = "layer."
#: Tensors that are computed, or that training alone reads.
_UNREAD = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_COMPUTED = "rotary_emb.inv_freq"
#: Field of speculators' configurations with a head's kind.
SPECULATORS_TYPE = "speculators_model_type"
#: Fields that would change what is computed, with the values, beside a missing one and null, that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}
#: Such fields of speculators' heads alone: in other configurations they are the target's.
_NEUTRAL_OF_SPECULATORS: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
#: Switches that change nothing that is computed here.
_HARMLESS = ("do_sample", "embed_requires_grad", "has_no_defaults_at_init", "tie_word_embeddings", "use_cache")
_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_AUX = "eagle_aux_hidden_state_layer_ids"
#: Fields that any of a configuration's objects may have.
_ANYWHERE = (*_FLAGS, _AUX, "target_hidden_size", "draft_vocab_size")
#: Types of the decoder layer that speculators has.
_LAYER_TYPES = (None, "llama", "qwen3")
_log = logging.getLogger(__name__)

Stored = dict[str, Mapping[str, Any]]


def is_head(config: Mapping[str, Any], names: set[str]) -> bool:
    """Whether a checkpoint of others is an EAGLE-3 head, or one of another kind, which :func:`head_of` refuses.

    Args:
        config: its ``config.json``.
        names: of its tensors.
    """
    layers = {prefix for prefix in _PREFIXES if any(name.startswith(prefix) for name in names)}
    return SPECULATORS_TYPE in config or "midlayer." in layers or bool("fc.weight" in names and layers)


def head_of(raw: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]) -> tuple[Eagle3Config, Stored]:
    """Return the configuration of a head and its tensors by our names. Raises ConfigError; with the code
    ``unsupported`` it names what is not computed.

    Args:
        raw: ``config.json``.
        stored: the tensors: ``dtype``, ``shape``, ``data``.
    """
    kind = raw.get(SPECULATORS_TYPE, "eagle3")
    if kind != "eagle3":
        raise ConfigError(f"speculators' {kind!r:.40} heads are not computed, eagle3 alone is", code="unsupported")
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in stored)), _PREFIXES[0])
    tensors: Stored = {}
    for name, tensor in stored.items():
        if name not in _UNREAD and not name.endswith(_COMPUTED):
            tensors[_LAYER + name.removeprefix(prefix) if name.startswith(prefix) else name] = tensor
    if f"{_LAYER}hidden_norm.weight" not in tensors and f"{_LAYER}self_attn.q_proj.weight" in tensors:
        raise ConfigError(
            "its layer has no hidden_norm: it is incomplete, or a head of EAGLE 1 or 2, which are not computed",
            code=WEIGHTS_DIFFER,
        )
    shapes = {name: tuple(tensor["shape"]) for name, tensor in stored.items()}
    config = _config(raw, {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}, shapes.get("t2d"))
    return config, tensors | _draft_to_target(tensors, config)


def _config(raw: Mapping[str, Any], shapes: Mapping[str, Shape], of_target: Shape | None) -> Eagle3Config:
    """Read a configuration; sizes that it does not say are those of the tensors.

    Args:
        shapes: of the tensors, by our names.
        of_target: shape of ``t2d``, if there is one.
    """
    layer = raw.get("transformer_layer_config", raw)
    inner = raw.get("eagle_config") or {}
    if not isinstance(layer, Mapping) or not isinstance(inner, Mapping):
        raise ConfigError("transformer_layer_config and eagle_config must be objects", code="wrong_type")
    given = {name: value for part in (layer, inner, raw) for name, value in part.items() if value is not None}
    for name in _ANYWHERE:
        if any(part.get(name) not in (None, given.get(name)) for part in (layer, inner)):
            raise ConfigError(f"its config.json says two things of {name}", code="inconsistent")
    of_speculators = SPECULATORS_TYPE in raw
    if of_speculators and (kind := layer.get("model_type")) not in _LAYER_TYPES:
        raise ConfigError(f"a layer of the type {kind!r:.40} is not computed", code="unsupported")
    for name, values in {**_NEUTRAL, **(_NEUTRAL_OF_SPECULATORS if of_speculators else {})}.items():
        value = layer.get(name, given.get(name))
        if value is not None and value not in values:
            raise ConfigError(f"{name} {value!r:.40} is not computed", code="unsupported")
    switched = {name for name, value in given.items() if value is True}
    if unknown := sorted(switched - {*_NEUTRAL, *_NEUTRAL_OF_SPECULATORS, *_FLAGS, *_HARMLESS}):
        _log.warning("this head may draft worse than it could: %s is not known, and not computed", ", ".join(unknown))
    kinds = layer.get("layer_types") or []
    if of_speculators and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ConfigError("layer_types other than full_attention are not computed", code="unsupported")
    try:
        hidden, joined = shapes["fc.weight"]
        heads = layer["num_attention_heads"]
        head_dim = _said(layer, "head_dim", lambda: shapes[f"{_LAYER}self_attn.q_proj.weight"][0] // heads)
        aux, target_hidden = given.get(_AUX, []), given.get("target_hidden_size", hidden)
        if target_hidden != hidden:
            raise ConfigError(
                f"target_hidden_size {target_hidden!r:.40} unlike its own hidden size is not computed",
                code="unsupported",
            )
        if joined != (len(aux) or 3) * hidden:
            raise ConfigError(f"fc reads {joined} numbers, not {len(aux) or 3} times {hidden}", code=WEIGHTS_DIFFER)
        decoder = {
            "hidden_size": _said(layer, "hidden_size", lambda: hidden),
            "num_heads": heads,
            "num_kv_heads": _said(
                layer, "num_key_value_heads", lambda: shapes[f"{_LAYER}self_attn.k_proj.weight"][0] // head_dim
            ),
            "head_dim": head_dim,
            "intermediate_size": _said(layer, "intermediate_size", lambda: shapes[f"{_LAYER}mlp.gate_proj.weight"][0]),
        }
        return Eagle3Config.from_mapping(
            {
                "target_num_layers": 0,
                "target_kv_size": 0,
                "vocab_size": of_target[0] if of_target else layer["vocab_size"],
                "draft_vocab_size": _said(given, "draft_vocab_size", lambda: shapes["lm_head.weight"][0]),
                "decoder": decoder,
                "rope": _rope(layer),
                "rms_norm_eps": _said(layer, "rms_norm_eps", lambda: 1e-6),
                "max_position_embeddings": _said(layer, "max_position_embeddings", lambda: 2048),
                "aux_layers": aux,
                "norm_before_fc": _flag(given, "norm_before_fc", "input_norm.weight" in shapes),
                "fc_norm": _flag(given, "fc_norm", "fc_norm.0.weight" in shapes),
                "norm_before_residual": _flag(given, "norm_before_residual", False),
                "norm_output": _flag(given, "norm_output", False),
                "qk_norm": (of_speculators and layer.get("model_type") == "qwen3")
                or f"{_LAYER}self_attn.q_norm.weight" in shapes,
                "own_embedding": "embed_tokens.weight" in shapes,
            }
        )
    except KeyError as error:
        what = "weights have" if "." in str(error.args[0]) else "config.json has"
        code = WEIGHTS_DIFFER if "." in str(error.args[0]) else "missing_field"
        raise ConfigError(f"its {what} no {error.args[0]}", code=code) from error
    except ConfigError:
        raise
    except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError("its sizes are those of no EAGLE-3 head", code=WEIGHTS_DIFFER) from error


def _said(given: Mapping[str, Any], name: str, missing: Callable[[], Any]) -> Any:
    """Return a field; what ``missing`` returns if there is none, or null."""
    value = given.get(name)
    return missing() if value is None else value


def _flag(given: Mapping[str, Any], name: str, missing: bool) -> bool:
    value = given.get(name, missing)
    if type(value) is not bool:
        raise ConfigError(f"{name} must be true or false, not {value!r:.40}", code="wrong_type")
    return value


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' ``rope_parameters``. As there, ``rope_scaling`` takes precedence; a missing base is 10,000,
    as in the authors' reader."""
    given = layer.get("rope_scaling") or layer.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ConfigError("rope_scaling must be an object", code="wrong_type")
    theta = _said(given, "rope_theta", lambda: _said(layer, "rope_theta", lambda: 10000.0))
    return {**given, "rope_theta": theta}


def _draft_to_target(tensors: Stored, config: Eagle3Config) -> Stored:
    """Return ``draft_to_target`` in place of ``d2t``, which is popped; only a smaller vocabulary needs one."""
    offsets = tensors.pop("d2t", None)
    tokens = np.arange(config.draft_vocab_size, dtype="<i8")
    if offsets is None and config.draft_vocab_size < config.vocab_size:
        raise ConfigError("its weights have no d2t", code=WEIGHTS_DIFFER)
    if offsets is not None:
        if tuple(offsets["shape"]) != tokens.shape or offsets["dtype"] not in ("I64", "I32"):
            raise ConfigError(f"d2t must hold {len(tokens)} whole numbers", code=WEIGHTS_DIFFER)
        tokens = tokens + np.frombuffer(offsets["data"], "<i8" if offsets["dtype"] == "I64" else "<i4")
        if len(np.unique(tokens)) < len(tokens):
            raise ConfigError("d2t gives a token of the target twice", code=WEIGHTS_DIFFER)
        if wrong := [token for token in (tokens.min(), tokens.max()) if not 0 <= token < config.vocab_size]:
            text = f"d2t gives the token {wrong[0]}, and its target has {config.vocab_size}"
            raise ConfigError(text, code="out_of_range")
    return {"draft_to_target": {"dtype": "I64", "shape": tokens.shape, "data": tokens.tobytes()}}


def read_torch_file(content: bytes) -> Stored:
    """Return the tensors of a ``pytorch_model.bin``, the format of torch since 1.6. Raises ConfigError: ``needs_torch``
    without torch; ``damaged`` for all but tensors, and for those that take more memory than the file."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError(
            f"weights in pytorch_model.bin are read by torch, which is not installed: {install_command('torch')}",
            code="needs_torch",
        ) from error
    names = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.bfloat16: "BF16"}
    names |= dict.fromkeys((torch.float16, torch.float32, torch.float64), "F32")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_size(sum(member.file_size for member in archive.infolist()), content)
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        _check_size(sum(tensor.numel() * tensor.element_size() for tensor in state.values()), content)
        found: Stored = {}
        for name, tensor in state.items():
            if type(name) is not str or tensor.dtype not in names:
                raise TypeError(f"{name} of the type {tensor.dtype}")
            kind = names[tensor.dtype]
            plain = tensor.float() if kind == "F32" else tensor.view(torch.int16) if kind == "BF16" else tensor
            data = plain.contiguous().numpy().tobytes()
            found[name] = {"dtype": kind, "shape": tuple(tensor.shape), "data": data}
    except (
        AttributeError,
        EOFError,
        LookupError,
        OverflowError,
        pickle.UnpicklingError,
        RuntimeError,
        TypeError,
        ValueError,
        zipfile.BadZipFile,
    ) as error:
        raise ConfigError(
            "its weights are not what torch 1.6 or later writes for tensors of real numbers alone", code="damaged"
        ) from error
    return found


def _check_size(size: int, content: bytes) -> None:
    """Raise ValueError for more bytes than a file has, as if it is compressed, or one number stands for many."""
    if size > len(content):
        raise ValueError(f"{size} bytes in a file of {len(content)}")
