"""Backends, drafters and writers of a bundle."""

from __future__ import annotations

from collections.abc import Collection

from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.drafters.sssd import SssdDrafter
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Manifest
from moa_runtime.options import DRAFTERS, DrafterName, OtherDrafterError


def backend_for(
    bundle: Bundle, name: DrafterName | None = None, backend: str | None = None, *, threads: int = 2
) -> Backend | None:
    """Load the graph that a drafter computes; return None for a drafter or a bundle without one.

    Args:
        name: see :func:`drafter_for`.
        backend: see :func:`moa_runtime.backends.load.load_backend`.

    Raises:
        OtherDrafterError: if the bundle's graph has another architecture.
        MoaError: no drafter has this name; see also :func:`moa_runtime.backends.load.load_backend`.
    """
    if name is not None:
        if name not in DRAFTERS:
            text = f"there is no drafter {name}: name one of {', '.join(DRAFTERS)}"
            raise MoaError(text, code="unknown_drafter")
        wanted, found = DRAFTERS[name].architecture, bundle.manifest.architecture
        if wanted is None:
            return None
        if wanted != found:
            raise OtherDrafterError(bundle.folder, found, name)
    if backend is None and not bundle.manifest.has_graph:
        return None
    return load_backend(bundle, backend, threads=threads)


def drafter_for(
    manifest: Manifest,
    backend: Backend | None,
    name: DrafterName | None = None,
    *,
    ngrams: bool = True,
    datastore: Datastore | None = None,
) -> Drafter | None:
    """Return a drafter for one conversation; None if the bundle leaves drafting to the verifier.

    Several may share the ``backend`` (:func:`backend_for`) and ``datastore``.

    Args:
        name: one of :data:`moa_runtime.options.DRAFTERS`; by default the bundle's own.
        ngrams: whether copies from conversation and datastore are mixed into the graph's candidates, see
            :class:`moa_runtime.drafters.ngram.NgramMixture`.
    """
    drafter = name or manifest.architecture
    if drafter == "none":
        return None
    if backend is None:
        return graphless_drafter(drafter, manifest.stop_tokens, datastore)
    mixture = NgramMixture(manifest.stop_tokens, datastore=datastore) if ngrams else None
    return MoaDrafter(
        backend,
        max_context=manifest.max_context,
        stop_tokens=manifest.stop_tokens,
        mixture=mixture,
        stopping_rule=manifest.stopping_rule,
    )


def graphless_drafter(name: str, stop_tokens: Collection[int], datastore: Datastore | None = None) -> Drafter:
    """Return a drafter that computes no graph."""
    assert name == "sssd"
    return SssdDrafter(stop_tokens, datastore)


def writer_for(manifest: Manifest, backend: Backend) -> MoaDrafter:
    """Return the offline writer of one conversation; several may share the ``backend``, see
    :func:`moa_runtime.backends.load.load_writer`.

    Its cache follows the conversation only when text is requested.
    """
    return MoaDrafter(backend, max_context=manifest.max_context, stop_tokens=manifest.stop_tokens)
