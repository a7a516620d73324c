"""Packages of the optional installs: which are missing, and versions of those that are there."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from moa_runtime.errors import MoaError

# Reading a GGUF file, which alone needs gguf and accelerate, reports them itself.
_TORCH = ("torch", "transformers")
_TRAIN = ("torch", "transformers", "safetensors", "filelock", "tqdm", "yaml")
_EXPORT = (*_TRAIN, "onnx")
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
        raise MoaError(f"{program} needs {', '.join(missing)}: {install_command(extra)}", code="missing_package")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, from the checkout or wheel that it came from; a
    checkout has vLLM in an environment of its own, because it pins other packages."""
    source = installed_from()
    if extra == "vllm" and source is not None and (source / "Makefile").is_file():
        return f'make -C "{source}" vllm (its programs: {source / ".venv-vllm" / "bin"})'
    command, environment = "pip install", Path(sys.prefix)
    if (environment / "uv-receipt.toml").exists():  # a plain pip would install into another environment
        command = f'uv pip install --python "{environment}"'
    elif (environment / "pipx_metadata.json").exists():
        command = f"pipx runpip {environment.name} install"
    return f'{command} "{source or "moa-edge"}[{extra}]"'


def installed_from() -> Path | None:
    """Return the checkout or the wheel of this installation; None if it is gone, or came from a package index."""
    with contextlib.suppress(PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        source = urlsplit(json.loads(distribution("moa-edge").read_text("direct_url.json") or "{}")["url"])
        path = Path(url2pathname(source.path))
        if source.scheme == "file" and path.exists():
            return path
    return None


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return versions by package name; packages that are not installed are left out."""
    found = {}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
