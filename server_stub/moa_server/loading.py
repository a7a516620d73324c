"""From the options of ``moa-serve`` to an engine, and to what drafts beside it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from moa_runtime.extras import require_extra
from moa_server.engine import Engine
from moa_server.options import ServeError
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.server_drafts import ServerDrafts
    from moa_server.transformers_engine import TransformersEngine


def load_engine(options: argparse.Namespace) -> TransformersEngine:
    """The target and drafter that the options name.

    Raises:
        ServeError: there is no such device.
        MoaError: what cannot be found, read, or does not fit together.
    """
    require_extra("server", "moa-serve")
    # Late, so that --help and refused options need no torch.
    import torch

    from moa_drafter.checkpoint import shipped_checkpoint
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.transformers_engine import TransformersEngine

    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ServeError(f"no torch device {options.device!r}: {str(error).splitlines()[0]}") from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, drafter = options.model or DEFAULT_TARGET, options.drafter
    if drafter is None and model == DEFAULT_TARGET:
        drafter = shipped_checkpoint()
    return TransformersEngine.load(
        model,
        drafter,
        options.device,
        options.max_context,
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        release_weights=True,
    )


def server_drafts(engine: Engine, settings: Settings, options: argparse.Namespace) -> ServerDrafts | None:
    """What drafts where clients let the verifier go on by itself; None with ``--no-drafts``."""
    if options.no_drafts:
        return None
    from moa_server.server_drafts import ServerDrafts
    from moa_server.torch_backend import backend_of

    limits = settings.limits(engine.max_context, engine.capabilities)
    return ServerDrafts(backend_of(engine), limits, engine.stop_tokens, most=settings.max_sessions)
