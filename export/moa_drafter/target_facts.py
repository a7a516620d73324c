"""Facts of a target, read without loading its weights. Needs neither torch nor transformers for families that
:mod:`moa_decoder.families` describes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moa_decoder.checkpoint_fields import read_fields
from moa_decoder.checkpoint_weights import read_config, stored_tensors
from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import read_parts
from moa_decoder.gguf_weights import GgufWeights
from moa_decoder.spec import DecoderSpec
from moa_drafter.target_folder import gguf_of, weights_of
from moa_drafter.target_source import builtin_of
from moa_runtime.checked_file import read_checked_text
from moa_runtime.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, RecommendedSampling

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class TargetFacts:
    """A target without its weights.

    Attributes:
        config: the fields of its config.json as attributes, in transformers' spelling and with its defaults.
        stop_tokens: ids that end the assistant's turn, ascending.
    """

    folder: Path
    config: Any
    fingerprint: str
    stop_tokens: tuple[int, ...]

    @property
    def recommended_sampling(self) -> RecommendedSampling | None:
        """The authors' sampling for chats, from the generation configuration or a built-in target's model card."""
        return recommended_sampling(self.folder, _generation(self.folder))

    @property
    def chat_template(self) -> str:
        """The source of the default chat template, Jinja. Raises TargetError if there is none."""
        file = self.folder / CHAT_TEMPLATE_FILE
        try:
            template = read_checked_text(file) if file.is_file() else _tokenizer(self.folder).get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(file) from error
        if isinstance(template, list):  # several with names
            template = {each["name"]: each["template"] for each in template if isinstance(each, dict)}.get("default")
        if not isinstance(template, str) or not template:
            raise TargetError(f"the target in {self.folder} has no chat template", code="no_chat_template")
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by name, such as ``bos_token``, for the chat template."""
        return special_texts(self.folder)


def facts_of(folder: Path) -> TargetFacts:
    """Read the facts of a target of a described family.

    Raises:
        TargetError: ``unsupported_target`` for other families; ``weights_differ``; ``unreadable``, ``damaged`` or
            ``file_missing`` for files; ``no_stop_token``.
    """
    spec, raw = weights_of(folder).spec, read_config(folder)
    return TargetFacts(folder, _config(raw, spec), target_fingerprint(folder), _stop_tokens(folder, raw))


def target_fingerprint(folder: Path) -> str:
    """Return the identity of a target: SHA-256 over its configuration, and names and first rows of its tensors in the
    order of their names, whatever files they are in.

    That tells fine-tunes and quantisations apart without reading gigabytes; it does not protect against forgery. A GGUF
    file counts as the checkpoint that it is dequantised to. Raises TargetError if the weights are missing or (code
    ``damaged``) cannot be read.
    """
    digest, raw = hashlib.sha256(), read_config(folder)
    identity = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    digest.update(json.dumps({key: raw.get(key) for key in identity}, sort_keys=True).encode())
    if parts := gguf_of(folder):
        for name, shape, numbers in GgufWeights(parts).checkpoint(first_rows=True):
            digest.update(f"{name}{list(shape)}F32".encode())
            digest.update(numbers.astype("<f4").tobytes())
        return digest.hexdigest()[:32]
    for name, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.first_row())
    return digest.hexdigest()[:32]


def parameters_of(folder: Path) -> int:
    """Return the numbers of a target's weights; 0 for a quantised checkpoint, several of which are one stored number.
    Raises TargetError as :func:`target_fingerprint` does."""
    if parts := gguf_of(folder):
        return sum(math.prod(tensor.shape) for part in read_parts(parts) for tensor in part.tensors.values())
    if read_config(folder).get("quantization_config"):
        return 0
    return sum(math.prod(tensor.shape) for tensor in stored_tensors(folder).values())


def special_texts(folder: Path) -> dict[str, str]:
    """Return the texts of a tokenizer's special tokens by name."""
    said = {**_read(folder / "special_tokens_map.json"), **_tokenizer(folder)}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in said.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def recommended_sampling(folder: Path, generation: Mapping[str, Any]) -> RecommendedSampling | None:
    """Return the sampling that a generation configuration says, or a built-in target's model card."""
    if generation.get("temperature") is not None and generation.get("do_sample", True):
        return RecommendedSampling(float(generation["temperature"]), float(generation.get("top_p") or 1.0))
    builtin = builtin_of(folder)
    return builtin.sampling if builtin else None


def _config(raw: Mapping[str, Any], spec: DecoderSpec) -> SimpleNamespace:
    """Return a configuration as transformers' classes have it."""
    layer, windows = spec.layers[0], [layer.window for layer in spec.layers if layer.window]
    rope = raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta", 1e4)}
    derived = {  # what the weights were compared with
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": layer.heads,
        "head_dim": layer.head_dim,
        "num_key_value_heads": layer.kv_heads,
        "max_position_embeddings": spec.max_context,
        "sliding_window": min(windows, default=None),
        "rope_parameters": {"rope_type": rope.get("type", "default"), **rope},
    }
    return SimpleNamespace(**{**raw, **derived})


def _stop_tokens(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end the assistant's turn, of generation configuration and tokenizer."""
    generation = _generation(folder) if (folder / _GENERATION).is_file() else raw
    listed = generation.get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [listed]) | {
        _id_of(folder, special_texts(folder).get("eos_token"))
    }
    if not (found := {number for number in ids if type(number) is int and number >= 0}):
        raise TargetError(f"the target in {folder} names no end-of-turn token (eos_token_id)", code="no_stop_token")
    return tuple(sorted(found))


def _id_of(folder: Path, text: str | None) -> int | None:
    tokenizer = _read(folder / TOKENIZER_FILE)
    try:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
        vocab = tokenizer["model"]["vocab"]
        number = added.get(text, vocab.get(text) if isinstance(vocab, dict) else None)
    except (AttributeError, KeyError, TypeError) as error:
        raise _unreadable(folder / TOKENIZER_FILE) from error
    return number if type(number) is int else None


def _generation(folder: Path) -> dict[str, Any]:
    return _read(folder / _GENERATION)


def _tokenizer(folder: Path) -> dict[str, Any]:
    return _read(folder / "tokenizer_config.json")


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no such file. Raises TargetError (``unreadable``)."""
    return read_fields(path) if path.exists() else {}


def _unreadable(path: Path) -> TargetError:
    if not path.exists():
        return TargetError(f"there is no {path}: fetch the target again", code="file_missing")
    return TargetError(f"{path} is unreadable: fetch the target again", code="unreadable")
