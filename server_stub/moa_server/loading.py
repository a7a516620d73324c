"""The engine that the options of ``moa-serve`` name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.extras import require_extra
from moa_server.options import ServeError

if TYPE_CHECKING:
    from moa_server.transformers_engine import TransformersEngine
    from moa_server.vllm_engine.engine import VllmEngine


def load_engine(options: argparse.Namespace) -> TransformersEngine | VllmEngine:
    """Load it, with target and drafter.

    Raises:
        MoaError: packages are missing, or what is asked for cannot be found, read, or does not fit together.
    """
    require_extra("server", "moa-serve")
    if options.engine == "vllm":  # before torch is imported
        from moa_server.vllm_engine.environment import prepare

        prepare(options.threads)
    # Late, so that --help and refused options need no torch.
    import torch

    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ServeError(f"no torch device {options.device!r}: {str(error).splitlines()[0]}") from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return _vllm(options) if options.engine == "vllm" else _transformers(options)


def _transformers(options: argparse.Namespace) -> TransformersEngine:
    from moa_server.transformers_engine import TransformersEngine

    return TransformersEngine.load(
        *_names(options),
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        release_weights=True,
    )


def _vllm(options: argparse.Namespace) -> VllmEngine:
    from moa_server.vllm_engine.engine import VllmEngine

    return VllmEngine.load(
        *_names(options),
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        threads=options.threads,
    )


def _names(options: argparse.Namespace) -> tuple[str, Path | None]:
    """Target and drafter."""
    from moa_drafter.checkpoint import shipped_checkpoint
    from moa_drafter.target_source import DEFAULT_TARGET

    model, drafter = options.model or DEFAULT_TARGET, options.drafter
    if drafter is None and model == DEFAULT_TARGET:
        drafter = shipped_checkpoint()
    return model, drafter
