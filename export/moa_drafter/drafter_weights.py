"""Read drafter checkpoints without torch: ``config.json`` and ``model.safetensors`` in one folder.

Checkpoints of the paper's authors, such as ``huawei-noah/MOASpec-Llama-3-8B-Instruct``, have the same tensor names. Two
things differ: their ``config.json`` is the target's or a ``moa_spec`` one, so most dimensions are read off the tensors;
and they concatenate the target's keys and values head by head (key 0, value 0, key 1, ...; github.com/huawei-noah/HEBO,
MOASpec's training forward). We put all keys before all values, so the layer self-attention's width is permuted here.

Published EAGLE-3 heads are read too, see :mod:`moa_drafter.eagle3_head`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from moa_decoder.checkpoint_fields import MOST_LAYERS
from moa_decoder.weight_faults import WEIGHTS_DIFFER, WeightFaults
from moa_drafter.config import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    LARGEST_WEIGHTS,
    WEIGHTS_FILE,
    CheckpointError,
    ConfigError,
    DrafterConfig,
    Eagle3Config,
    EarlyExitConfig,
    IndependentConfig,
    LayerDims,
    RivalConfig,
    config_of,
    weights_file,
)
from moa_drafter.eagle3_head import SPECULATORS_TYPE, head_of, is_head, read_torch_file
from moa_runtime.checked_file import read_checked
from moa_runtime.errors import reason_of

Shape = tuple[int, ...]

#: Types of tensors in safetensors, as numpy reads them; bfloat16 is the upper half of a float32.
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
_TOKENS = "draft_to_target"
#: Fields of configurations that count layers, and tokens of a vocabulary; the largest of these have 262,144.
_LAYER_COUNTS = frozenset({"num_hidden_layers", "target_num_layers", "target_layers", "layers", "exit_layer"})
_TOKEN_COUNTS, _MOST_TOKENS = frozenset({"vocab_size", "draft_vocab_size"}), 1 << 22
_OTHER_HEAD = "take another head, or draft with --drafter sssd"


class DrafterWeights:
    """The configuration and the tensors of a checkpoint.

    Attributes:
        fingerprint: see :func:`moa_drafter.config.drafter_fingerprint`.
    """

    def __init__(
        self,
        config: DrafterConfig | RivalConfig,
        fingerprint: str,
        stored: Mapping[str, Mapping[str, Any]],
        order: NDArray[np.int64] | None = None,
    ) -> None:
        self.config, self.fingerprint = config, fingerprint
        self._stored, self._order = stored, order

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._stored)

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor: float32, or int64 if it holds whole numbers."""
        stored = self._stored[name]
        kind, shape = stored["dtype"], stored["shape"]
        if kind in _INTEGERS:
            return np.frombuffer(stored["data"], _INTEGERS[kind]).reshape(shape).astype(np.int64)
        numbers = np.frombuffer(stored["data"], _FLOATS[kind]).reshape(shape)
        with np.errstate(over="ignore"):  # read_weights refuses what is infinite then
            wide = (numbers.astype("<u4") << 16).view("<f4") if kind == "BF16" else numbers.astype(np.float32)
        if self._order is None or not name.startswith(("layer_self_attention.", "Ekv2E.weight")):
            return wide
        over_outputs = wide.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight"))
        return np.take(wide, self._order, axis=0 if over_outputs else 1)


def read_weights(folder: Path) -> DrafterWeights:
    """Read and check the checkpoint of a drafter of any architecture, in our layout or in that of the paper's authors.

    Raises:
        CheckpointError: missing or damaged files, weights that cannot draft, and (code ``weights_differ``) missing,
            superfluous or misshapen tensors.
    """
    weights = weights_file(folder)
    published, advice = False, "expected one written by moa-train"
    if weights.name != WEIGHTS_FILE:
        advice = _OTHER_HEAD
    try:
        raw, text = _read_config(folder / CONFIG_FILE)
        config = None if is_of_others(raw) else config_of(raw)
        content = read_checked(weights, LARGEST_WEIGHTS)
        stored: dict[str, Any] = (
            dict(deserialize(content)) if weights.name == WEIGHTS_FILE else read_torch_file(content)
        )
        if config is None and is_head(raw, set(stored)):
            advice = _OTHER_HEAD
            config, stored = head_of(raw, stored)
        elif config is None and (published := is_published(raw)):
            config = published_config(raw, {name: tuple(each["shape"]) for name, each in stored.items()})
            tokens = np.arange(config.vocab_size, dtype="<i8")
            stored[_TOKENS] = {"dtype": "I64", "shape": tokens.shape, "data": tokens.tobytes()}
        elif config is None:
            config = config_of(raw)
    except ConfigError as error:
        inside = folder / CHECKPOINT_FOLDER
        advice = f"name the checkpoint of the run, {inside}" if inside.is_dir() else advice
        raise CheckpointError(f"cannot load the drafter in {folder}: {error}; {advice}", code=error.code) from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}: expected a folder written by moa-train, or a published head in one file",
            code="file_missing",
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {weights}: {reason_of(error)}", code="unreadable") from error
    except SafetensorError as error:
        raise CheckpointError(f"cannot read {weights}: {error}; it may be truncated", code="damaged") from error
    if faults := WeightFaults.between({name: tuple(each["shape"]) for name, each in stored.items()}, shapes_of(config)):
        raise CheckpointError(
            f"the weights in {weights} are not those of its config.json: {faults}; take another, or train one",
            code=WEIGHTS_DIFFER,
        )
    order = None
    if published:
        # The target's key-value heads have the size of the decoder's own heads.
        heads = config.target_kv_size // (2 * config.decoder.head_dim)
        order = np.arange(config.target_kv_size).reshape(heads, 2, -1).swapaxes(0, 1).ravel()
    digest = hashlib.sha256(text)
    digest.update(content)
    made = DrafterWeights(config, digest.hexdigest()[:32], stored, order)
    diverged = "take an earlier checkpoint, or train with a lower learning_rate"
    for name, each in stored.items():
        kinds = _INTEGERS if name == _TOKENS else _FLOATS
        if each["dtype"] not in kinds:
            raise CheckpointError(
                f"{weights}: {name!r} is of the type {each['dtype'][:20]}, expected {', '.join(kinds)}: {advice}",
                code="unsupported_type",
            )
        if not np.isfinite(made.array(name)).all():
            raise CheckpointError(
                f"{weights}: {name!r} holds something else than finite real numbers, as after a training run that "
                f"diverged: {advice if advice == _OTHER_HEAD else diverged}",
                code="not_finite",
            )
    tokens = made.array(_TOKENS)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= config.vocab_size:
        raise CheckpointError(
            f"{weights}: draft_to_target must hold tokens from 0 to {config.vocab_size - 1}, not "
            f"{low if low < 0 else high}: train the drafter again",
            code="out_of_range",
        )
    return made


def shapes_of(config: DrafterConfig | RivalConfig) -> dict[str, Shape]:
    """Return the shapes of a checkpoint's tensors by name."""
    hidden, layers = config.decoder.hidden_size, {}
    shapes: dict[str, Shape] = {_TOKENS: (config.draft_vocab_size,), "norm.weight": (hidden,)}
    if isinstance(config, DrafterConfig):
        layers = {name: config.decoder for name in ("self_attention", "cross_attention")}
        layers["layer_self_attention"] = config.layer_attention
        if config.trained_target_layers:
            layers |= {f"tail.{n}": config.decoder for n in range(config.target_layers)}
        shapes |= {"Ekv2E.weight": (hidden, config.target_kv_size), "Ekv2E.bias": (hidden,)}
        if config.layer_scale:
            shapes["layer_scale"] = (len(config.lsa_layers), config.target_kv_size)
        if not config.final_norm:
            del shapes["norm.weight"]
    elif isinstance(config, Eagle3Config):
        shapes |= _eagle3(config)
    elif isinstance(config, EarlyExitConfig):
        layers["exit"] = config.decoder
    elif isinstance(config, IndependentConfig):
        layers = {f"layers.{n}": config.decoder for n in range(config.layers)}
    return shapes | {f"{name}.{part}": shape for name, dims in layers.items() for part, shape in _layer(dims).items()}


def parameters_of(config: DrafterConfig | RivalConfig) -> tuple[int, int]:
    """Return the numbers of parameters of a checkpoint, and of the target's layers that a drafting step runs."""
    own = sum(math.prod(shape) for name, shape in shapes_of(config).items() if name != _TOKENS)
    frozen = 0
    if isinstance(config, DrafterConfig) and not config.trained_target_layers:
        frozen = config.target_layers
    elif isinstance(config, EarlyExitConfig):
        frozen = config.exit_layer
    return own, frozen * sum(math.prod(shape) for shape in _layer(config.decoder).values())


def _layer(dims: LayerDims) -> dict[str, Shape]:
    hidden, inner = dims.hidden_size, dims.intermediate_size
    q_size, kv_size = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _eagle3(config: Eagle3Config) -> dict[str, Shape]:
    hidden, joined, head_dim = (
        config.decoder.hidden_size,
        config.inputs * config.decoder.hidden_size,
        config.decoder.head_dim,
    )
    shapes = {f"layer.{name}": shape for name, shape in _layer(config.decoder).items()}
    for name in ("q_proj", "k_proj", "v_proj"):  # of the normed embedding and the normed feature
        shapes[f"layer.self_attn.{name}.weight"] = (shapes[f"layer.self_attn.{name}.weight"][0], 2 * hidden)
    shapes |= {
        "layer.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, joined),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.qk_norm:
        shapes |= {f"layer.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (joined,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{n}.weight": (hidden,) for n in range(config.inputs)}
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    return shapes


def _read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read a ``config.json`` of either layout; return it with its bytes. Raises ConfigError."""
    try:
        content = read_checked(path)
        raw = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path.name}: {reason_of(error)}", code="unreadable") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name} is no UTF-8 text", code="not_utf8") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no JSON: {error}", code="not_json") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path.name} is not a drafter configuration: expected one JSON object", code="wrong_type")
    _check_counts(path.name, raw)
    return raw, content


def _check_counts(name: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and tokens for which memory would be taken before shapes are compared. Raises
    ConfigError."""
    for field, value in values.items():
        if isinstance(value, dict):
            _check_counts(name, value)
        most = MOST_LAYERS if field in _LAYER_COUNTS else _MOST_TOKENS if field in _TOKEN_COUNTS else None
        if most is not None and isinstance(value, int | float) and value > most:
            raise ConfigError(f"{field} in {name} must be at most {most}, not {value}", code="out_of_range")


def is_of_others(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is not ours, but a model's or a head's."""
    return "architecture" not in config and not config.keys().isdisjoint(
        {"model_type", "hidden_size", SPECULATORS_TYPE}
    )


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of the authors' layout, not ours."""
    return config.get("model_type") in ("moa_spec", "llama") and "architecture" not in config


def published_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
    """Make the configuration from ``config.json`` and the shapes of the tensors. Raises ConfigError if neither has a
    field."""
    if "model.embed_tokens.weight" in shapes:
        raise ConfigError("its weights are those of a whole model", code="weights_differ")
    if "Ekv2E.weight" not in shapes:
        raise ConfigError("its weights have no Ekv2E.weight", code="weights_differ")
    try:
        hidden, kv_size = shapes["Ekv2E.weight"]
        # A moa_spec configuration keeps the number of key-value heads under this name, and adds head_dim.
        heads = hidden // int(config["head_dim"]) if "head_dim" in config else int(config["num_attention_heads"])
        vocab_size = int(config["vocab_size"])
        layers = int(config["num_hidden_layers"] if config["model_type"] == "llama" else config["target_num_layers"])
        return DrafterConfig(
            target_num_layers=layers,
            target_kv_size=kv_size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            decoder=_dims("self_attention", shapes, hidden, heads),
            layer_attention=_dims("layer_self_attention", shapes, kv_size, heads),
            lsa_layers=tuple(range(layers)),
            rope_theta=float(config.get("rope_theta", 500000.0)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            max_position_embeddings=int(config.get("max_position_embeddings", 8192)),
            final_norm=False,
            layer_scale=False,
        )
    except KeyError as error:
        name = error.args[0]
        hint = ": add it, the number of the target's layers" if name == "target_num_layers" else ""
        raise ConfigError(f"the published checkpoint does not say {name}{hint}", code="missing_field") from error
    except ConfigError:
        raise
    except (IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            "the shapes of the published checkpoint's tensors are those of no drafter", code="weights_differ"
        ) from error


def _dims(name: str, shapes: Mapping[str, tuple[int, ...]], width: int, heads: int) -> LayerDims:
    head_dim = width // heads
    kv_heads = shapes[f"{name}.self_attn.k_proj.weight"][0] // head_dim
    return LayerDims(width, heads, kv_heads, head_dim, shapes[f"{name}.mlp.gate_proj.weight"][0])
