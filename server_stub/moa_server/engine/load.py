"""Make the engine and the server-side drafting from the options of ``moa-serve``."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.optional_deps import require_extra
from moa_runtime.options import too_many_threads
from moa_server.engine.base import Engine
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.drafting.server_drafting import ServerDrafting
    from moa_server.engine.transformers import TransformersEngine
    from moa_server.engine.vllm.engine import VllmEngine

_log = logging.getLogger(__name__)


def load_engine(options: argparse.Namespace) -> TransformersEngine | VllmEngine:
    """Load the engine with target and drafter; log a warning if there are more threads than processors.

    Raises:
        MoaError: packages, target or drafter are missing, unreadable, or do not fit together.
    """
    require_extra("server", "moa-serve")
    if warning := too_many_threads(options.threads):
        _log.warning("%s", warning)
    if options.engine == "vllm":  # before torch is imported
        from moa_server.engine.vllm.environment import prepare

        prepare(options.threads)
    # Late, so that --help and refused options need no torch.
    import torch

    from moa_drafter.devices import check_device

    check_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return _vllm(options) if options.engine == "vllm" else _transformers(options)


def server_drafts(engine: Engine, settings: Settings, options: argparse.Namespace) -> ServerDrafting | None:
    """Make the drafting for clients that grant credit; None with ``--no-drafts``."""
    if options.no_drafts:
        return None
    from moa_server.drafting.batched_model import backend_of
    from moa_server.drafting.server_drafting import ServerDrafting

    limits = settings.limits(engine.max_context, engine.capabilities)
    return ServerDrafting(backend_of(engine), limits, engine.stop_tokens, most=settings.max_sessions)


def _transformers(options: argparse.Namespace) -> TransformersEngine:
    from moa_server.engine.transformers import TransformersEngine

    return TransformersEngine.load(
        *_names(options),
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        release_weights=True,
    )


def _vllm(options: argparse.Namespace) -> VllmEngine:
    from moa_server.engine.vllm.engine import VllmEngine

    return VllmEngine.load(
        *_names(options),
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        threads=options.threads,
    )


def _names(options: argparse.Namespace) -> tuple[str, Path | None]:
    """Return the names of target and drafter."""
    from moa_drafter.pretrained import checkpoint_of
    from moa_drafter.target_source import DEFAULT_TARGET

    model = options.model or DEFAULT_TARGET
    without = options.drafter is None and model != DEFAULT_TARGET  # the default drafter is for the default target
    return model, None if without else checkpoint_of(options.drafter)
