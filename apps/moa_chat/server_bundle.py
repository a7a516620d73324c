"""The bundle for a verifier: one that is here already, else the one that the verifier hands out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from moa_chat.chat_config import open_bundle
from moa_runtime.bundle import Bundle
from moa_runtime.bundle_download import (
    DownloadError,
    NotOfferedError,
    Offer,
    Progress,
    best_offer,
    fetch_bundle,
    kept_bundle,
    offers,
)
from moa_runtime.errors import MoaError
from moa_runtime.manifest import BundleError, read_manifest
from moa_runtime.options import DRAFTERS, WITHOUT_GRAPH, DrafterName
from moa_runtime.paths import bundle_of_drafter
from moa_runtime.transport import Endpoint

_REFRESH_S = 0.25
_LINES_S = 2.0  # if stderr is no terminal


def bundle_for_server(
    endpoint: Endpoint,
    folder: Path | None,
    drafter: DrafterName | None,
    *,
    writer: bool,
    progress: Progress = lambda received, total: None,
) -> Bundle:
    """Return the bundle to use with a verifier.

    That is the named one; else the one that ``moa-export`` made here, if it fits; else the verifier's, from the cache
    folder or downloaded. If the verifier is away, it is the one last used with its address.

    Args:
        folder: named by the user; None for none.
        drafter: named by the user; None for the bundle's own.
        writer: whether to bring the offline writer too.

    Raises:
        MoaError: no bundle is here, and none can be had.
    """
    if folder is not None:
        return open_bundle(folder, drafter)
    try:
        offered = offers(endpoint)
        if _made_here(offered, drafter):
            return open_bundle(None, drafter)
        any_fits = drafter is None or not DRAFTERS[drafter].has_graph
        wanted = [one for one in offered if any_fits or one.architecture == DRAFTERS[drafter].architecture]
        if not wanted:
            others = ", ".join(sorted({one.architecture for one in offered if one.architecture not in WITHOUT_GRAPH}))
            text = f"the server at {endpoint.address} has no drafter {drafter}: leave --drafter out, or give sssd"
            raise NotOfferedError(f"{text}, or {others}" if others else text, code="no_drafter")
        return Bundle.open(fetch_bundle(endpoint, best_offer(wanted), writer=writer, progress=progress))
    except DownloadError as error:
        if error.code not in ("unreachable", "no_bundle", "no_graph"):
            raise
        if not isinstance(error, NotOfferedError):
            with contextlib.suppress(BundleError):
                if (kept := kept_bundle(endpoint)) is not None:
                    return Bundle.open(kept)
        try:
            return open_bundle(None, drafter)
        except MoaError as other:
            if other.code != "no_bundle":
                raise
            if isinstance(error, NotOfferedError):
                raise MoaError(f"{error}, and {other}", code="no_bundle") from error
            text = f"{error}; no bundle of it is here yet, so start the server, or check the address"
            raise DownloadError(text, code="unreachable") from error


def _made_here(offered: list[Offer], drafter: DrafterName | None) -> bool:
    """Return whether the bundle of ``moa-export`` in its usual place is one of the offered target and drafter."""
    try:
        manifest = read_manifest(bundle_of_drafter(drafter))
    except BundleError:
        return False
    same = [one for one in offered if one.fingerprints == manifest.fingerprints]
    return bool(same) and manifest.architecture not in WITHOUT_GRAPH


@contextlib.contextmanager
def shown_progress(server: str) -> Iterator[Progress]:
    """Show on stderr how far the download from a verifier is: bytes, seconds, and those that it still takes."""
    began = last = time.monotonic()
    first: int | None = None  # bytes that were here before
    width = 0
    live = sys.stderr.isatty()

    def show(received: int, total: int) -> None:
        nonlocal first, last, width
        now = time.monotonic()
        if first is None:
            first = received
            print(f"fetching the bundle of {server}, {total / 1e6:.1f} MB, once", file=sys.stderr, flush=True)
        if now - last < (_REFRESH_S if live else _LINES_S) and received < total:
            return
        last = now
        line = f"{received / 1e6:.1f} of {total / 1e6:.1f} MB after {now - began:.0f} s"
        if first < received < total:
            line += f", {(total - received) * (now - began) / (received - first):.0f} s to go"
        width = max(width, len(line))
        print(f"\r{line:{width}}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if live and width:
            print(file=sys.stderr)
