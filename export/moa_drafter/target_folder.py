"""A target's folder made of a GGUF file, without torch and transformers.

It holds the file itself, and its configuration, tokenizer and chat template in the form of a checkpoint. Programs that
need a checkpoint's tensors call :func:`write_tensors` first.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from moa_decoder.checkpoint_weights import CheckpointWeights
from moa_decoder.errors import TargetError
from moa_decoder.gguf_file import is_gguf, parts_of
from moa_decoder.gguf_weights import GgufWeights
from moa_decoder.weights import DecoderWeights
from moa_drafter.gguf_tokenizer import SPECIAL, special_tokens, tokenizer_of
from moa_runtime.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE

_TENSORS = "model.safetensors"
#: Classes of transformers, by a configuration's model_type.
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "olmo2": "Olmo2",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
}
#: Fields of a configuration for tokens, by key of the metadata.
_TOKENS = {name.removesuffix("_token") + "_token_id": f"tokenizer.ggml.{key}" for name, key in SPECIAL.items()}


def write_folder(parts: Sequence[Path], place: Path) -> None:
    """Make the folder of a GGUF file; its parts are copied. A tokenizer that is not described here is left to
    transformers, if that is installed.

    Raises:
        TargetError: see :class:`moa_decoder.gguf_weights.GgufWeights` and
            :func:`moa_drafter.gguf_tokenizer.tokenizer_of`.
    """
    weights = GgufWeights(parts)
    for layer in range(len(weights.spec.layers)):
        weights.matrix(layer, "down")  # of the types that a file mixes; refused now, not when a conversation begins
    place.mkdir()
    _write_tokenizer(parts[0], weights, place)
    ids = {name: weights.metadata[key] for name, key in _TOKENS.items() if key in weights.metadata}
    _write_json(place / "generation_config.json", ids)
    config = weights.config
    shape = {"architectures": [f"{_CLASSES[config['model_type']]}ForCausalLM"], "dtype": "float32"}
    # Some families have another padding if a file names none.
    _write_json(place / "config.json", {**config, **shape, **dict.fromkeys(_TOKENS), **ids})
    for part in parts:  # no links: a file that is fetched again in its place would change this one
        shutil.copyfile(part, place / part.name)


def _write_tokenizer(file: Path, weights: GgufWeights, place: Path) -> None:
    try:
        tokenizer = tokenizer_of(weights.name, weights.metadata, weights.spec.vocab_size)
    except TargetError as error:
        if error.code != "unsupported_tokenizer" or importlib.util.find_spec("transformers") is None:
            raise
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(place)
        except Exception as theirs:  # it has many errors for what it does not know
            raise error from theirs
        return
    tokenizer.save(str(place / TOKENIZER_FILE))
    texts = special_tokens(weights.name, weights.metadata)
    # As transformers writes it; without a length, which this number means there.
    known = {"backend": "tokenizers", "model_max_length": int(1e30), "tokenizer_class": "TokenizersBackend"}
    _write_json(place / "tokenizer_config.json", {**known, **texts})
    template = weights.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (place / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")


@contextlib.contextmanager
def room_in(place: Path, needed: int | None = None) -> Iterator[None]:
    """Raise TargetError (``disk_full``) if there is no room for what is written into a folder of the cache.

    Args:
        needed: bytes of all that lies there at the same time; None if they are not known before.
    """
    try:
        yield
    except Exception as error:  # those of tokenizers and safetensors are no OSErrors
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        free = f"{shutil.disk_usage(place).free / 1e6:.0f} MB"  # what was written is removed
        room = f"{needed / 1e6:.0f} MB in {place}, where {free} are free" if needed else f"more than {free} in {place}"
        text = f"making the target needs {room}: make room, or set MOA_EDGE_CACHE to a folder with more"
        raise TargetError(text, code="disk_full") from error


def gguf_of(folder: Path) -> list[Path]:
    """Return the parts of the GGUF file that a folder was made of; none if it is a checkpoint."""
    files = sorted(file for file in folder.glob("*") if is_gguf(file) and not file.name.startswith("."))
    return parts_of(files[0]) if files else []


def weights_of(folder: Path, bits: Literal[4, 8, 32] | None = None) -> DecoderWeights:
    """Open the weights of a target's folder.

    Args:
        bits: of matrices; None for a GGUF file's own, and for 32 of a checkpoint.

    Raises:
        TargetError: see :class:`moa_decoder.gguf_weights.GgufWeights` and
            :class:`moa_decoder.checkpoint_weights.CheckpointWeights`.
    """
    parts = gguf_of(folder)
    return GgufWeights(parts, bits) if parts else CheckpointWeights(folder, bits or 32)


def write_tensors(folder: Path) -> None:
    """Dequantise a GGUF file in its folder as model.safetensors, once, for programs that need a checkpoint.

    Raises:
        TargetError: ``scales_differ`` if the file scales rotary positions as no config.json can say; ``disk_full``.
    """
    parts = gguf_of(folder)
    if not parts or (folder / _TENSORS).is_file():
        return
    from safetensors.numpy import save_file

    with FileLock(f"{folder}.lock"):
        if (folder / _TENSORS).is_file():
            return
        weights = GgufWeights(parts)
        if weights.scaled:
            raise TargetError(
                f"{weights.name} scales its rotary positions by a tensor (rope_freqs), which transformers cannot read: "
                "take the model's folder or Hub id",
                code="scales_differ",
            )
        with room_in(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".tensors-") as scratch:
            made = Path(scratch) / _TENSORS
            save_file({name: numbers for name, _, numbers in weights.checkpoint()}, made, metadata={"format": "pt"})
            made.replace(folder / _TENSORS)  # one rename, so that no other process sees half of it


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
