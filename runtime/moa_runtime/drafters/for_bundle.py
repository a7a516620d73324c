"""What drafts with a bundle."""

from __future__ import annotations

from moa_runtime.backends.base import Backend
from moa_runtime.bundle import Manifest
from moa_runtime.drafters.mixture import NgramMixture
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.manners import Manners


def drafter_for(manifest: Manifest, backend: Backend, *, ngrams: bool = True) -> MoaDrafter:
    """A drafter for one conversation; ``backend``, a bundle's graph, may be shared by several.

    Args:
        ngrams: mix what the graph expects with what the conversation says already, see
            :class:`moa_runtime.drafters.mixture.NgramMixture`.
    """
    mixture = NgramMixture(manifest.stop_tokens) if ngrams else None
    return MoaDrafter(
        backend,
        max_context=manifest.max_context,
        stop_tokens=manifest.stop_tokens,
        mixture=mixture,
        manners=manifest.manners or Manners(),
    )


def writer_for(manifest: Manifest, backend: Backend) -> MoaDrafter:
    """What writes one conversation without a verifier; ``backend``, a bundle's writer, may be shared by several.

    Its cache follows the conversation only when it is asked for text.
    """
    assert manifest.writer is not None
    most = min(manifest.max_context, int(manifest.writer.details["max_context"]))
    return MoaDrafter(backend, max_context=most, stop_tokens=manifest.stop_tokens)
