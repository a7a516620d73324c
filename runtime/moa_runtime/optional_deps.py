"""Packages of the optional installs: which are missing, and versions of those that are there."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from moa_runtime.errors import MoaError

# Reading a GGUF file, which alone needs gguf and accelerate, reports them itself.
_TORCH = ("torch", "transformers")
_TRAIN = ("torch", "transformers", "safetensors", "filelock", "tqdm", "yaml")
_EXPORT = (*_TRAIN, "onnx", "onnxscript")
_SERVER = ("onnx", "safetensors", "filelock", "granian", "starlette", "prometheus_client")
MODULES = {
    "torch": _TORCH,
    "train": _TRAIN,
    "export": _EXPORT,
    "executorch": (*_EXPORT, "executorch", "torchao"),
    "coreml": (*_EXPORT, "coremltools"),
    "server": _SERVER,
    "vllm": (*_SERVER, *_TORCH, "vllm"),
    "web": (*_SERVER, "cryptography", "segno"),
    "ray": (*_SERVER, "ray", "fastapi"),
    "gateway": ("granian", "starlette", "pydantic"),
    "desktop": ("granian", "starlette", "pydantic", "PySide6", "markdown_it", "pygments"),
    "bench": (*_SERVER, *_TORCH, "matplotlib", "psutil", "httpx", "simpy"),
    "llamacpp": ("llama_cpp",),
}


def require_extra(extra: str, program: str) -> None:
    """Raise MoaError if packages of ``moa-edge[extra]`` are missing; it gives the install command."""
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        text = f'{program} needs {", ".join(missing)}: pip install "moa-edge[{extra}]"'
        raise MoaError(text, code="missing_package")


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return versions by package name; packages that are not installed are left out."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
