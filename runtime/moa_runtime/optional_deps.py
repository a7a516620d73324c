"""What the optional installs bring, so that a missing one is a sentence and not an ImportError."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from moa_runtime.errors import MoaError

# gguf and accelerate are missed only where a GGUF file is read, which says so itself.
_TRAIN = ("torch", "transformers", "safetensors", "filelock", "tqdm", "yaml")
_EXPORT = (*_TRAIN, "onnx", "onnxscript")
_SERVER = (*_TRAIN, "uvicorn", "starlette")
MODULES = {
    "train": _TRAIN,
    "export": _EXPORT,
    "executorch": (*_EXPORT, "executorch", "torchao"),
    "coreml": (*_EXPORT, "coremltools"),
    "server": _SERVER,
    "vllm": (*_SERVER, "vllm"),
    "web": (*_SERVER, "cryptography", "segno"),
    "ray": (*_SERVER, "ray", "fastapi"),
    "gateway": ("uvicorn", "starlette"),
    "desktop": ("uvicorn", "starlette", "PySide6", "markdown_it", "pygments"),
    "bench": (*_SERVER, "onnx", "matplotlib", "psutil", "httpx", "simpy"),
}


def require_extra(extra: str, program: str) -> None:
    """Check that what ``pip install "moa-edge[extra]"`` brings can be imported.

    Raises:
        MoaError: something is missing; the message gives the install command.
    """
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise MoaError(f'{program} needs {", ".join(missing)}: pip install "moa-edge[{extra}]"')


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions by package name; packages that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
