"""Bundles that a verifier hands out, so that a device needs no more than an address and a token."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moa_drafter.target_source import DEFAULT_TARGET
from moa_runtime.bundle import make_bundle
from moa_runtime.bundle_download import BUNDLES_PATH, NotOfferedError, Offer, best_offer
from moa_runtime.checked_file import open_checked, read_checked
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.manifest import MANIFEST_FILE, BundleError, Fingerprints, Manifest
from moa_runtime.options import DRAFTERS
from moa_runtime.paths import bundle_of_drafter, cache_dir, default_bundle
from moa_server.web.site import WebFile

_log = logging.getLogger(__name__)

_MOST_MANIFEST_BYTES = 1 << 24
#: Clients keep the files themselves: a cache in between would hold the same once more.
_HEADERS = {"cache-control": "no-store"}


@dataclass(frozen=True)
class OfferedBundles:
    """The bundles that fit the target and drafter which a verifier serves.

    Attributes:
        offers: the best first.
        files: their files by URL path.
    """

    offers: Sequence[Offer]
    files: Mapping[str, WebFile]

    @classmethod
    def of(cls, folders: Iterable[Path], served: Fingerprints, named: Path | None = None) -> OfferedBundles:
        """Read the manifests of these folders; those that hold no bundle, or one of another target, are left out.

        Args:
            served: the verifier's fingerprints.
            named: the folder that the operator has named; it has to fit.

        Raises:
            MoaError: ``named`` is no bundle, or belongs to another target or drafter.
        """
        offers: list[Offer] = []
        files: dict[str, WebFile] = {}
        for folder in dict.fromkeys([*([named] if named else []), *folders]):
            try:
                text = read_checked(folder / MANIFEST_FILE, _MOST_MANIFEST_BYTES, folder)
                manifest = Manifest.from_json(text.decode("utf-8", "replace"))
                if not _fits(manifest.fingerprints, served):
                    why = f"the bundle {folder} belongs to another target or drafter than this verifier's"
                    raise MoaError(f"{why}: name one of its own with --bundle", code="other_target")
                offer = _offer(hashlib.sha256(text).hexdigest(), manifest)
                found = _files(folder, offer.id, manifest, text)
            except (OSError, MoaError) as error:
                if folder == named:
                    if isinstance(error, MoaError):
                        raise
                    why = f"{folder} is no bundle that can be read: {reason_of(error)}; make one with moa-export"
                    raise BundleError(why, code="no_bundle") from error
                if not isinstance(error, FileNotFoundError):
                    _log.info("not offered: %s", error)
                continue
            offers.append(offer)
            files |= found
        return cls(offers, files)

    def message(self) -> dict[str, object]:
        """Return the list as JSON, see :func:`moa_runtime.bundle_download.offers`."""
        return {"bundles": [offer.to_json() for offer in self.offers]}


def bundles_to_offer(
    served: Fingerprints, model: str | None, drafter: str | None, named: Path | None
) -> OfferedBundles:
    """Return the bundles that ``moa-export`` and ``moa-serve --web`` have left in the cache folder, and the named one.

    If none of them is for computers (``moa-serve --web`` makes one for browsers), one is made: with the device half of
    a shipped drafter of the built-in target, in seconds, else without a graph, in a second, so that any client can
    chat.

    Args:
        served: the verifier's fingerprints.
        model, drafter: of the command line.
        named: the folder of ``--bundle``; None for none.

    Raises:
        MoaError: ``named`` cannot be offered.
    """
    own = next((name for name in DRAFTERS if name == drafter), None)
    place = bundle_of_drafter(own)
    folders = [place, default_bundle(), cache_dir() / "bundles" / "web"]
    found = OfferedBundles.of(folders, served, named)
    with contextlib.suppress(NotOfferedError):
        best_offer(found.offers)
        return found
    if served.drafter and own == drafter and model in (None, DEFAULT_TARGET) and not (place / MANIFEST_FILE).exists():
        try:
            make_bundle(place, "onnx", "moa-serve", own)
            return OfferedBundles.of(folders, served, named)
        except MoaError as error:
            _log.info("no device half is offered: %s", error)
    from moa_export.plain_bundle import cached_plain_bundle  # late: most verifiers have a bundle

    try:
        return OfferedBundles.of([*folders, cached_plain_bundle(model or DEFAULT_TARGET)], served, named)
    except MoaError as error:
        _log.info("no bundle for computers is offered: %s", error)
        return found


def _fits(bundle: Fingerprints, served: Fingerprints) -> bool:
    """Return whether a verifier serves the clients of a bundle; one without memory rows fits any drafter."""
    same = (bundle.target, bundle.tokenizer) == (served.target, served.tokenizer)
    return same and bundle.drafter in ("", served.drafter)


def _offer(identity: str, manifest: Manifest) -> Offer:
    size = sum(entry.bytes for entry in manifest.files.values())
    graphs = tuple(sorted(manifest.targets))
    return Offer(identity, manifest.fingerprints, manifest.target, manifest.architecture, graphs, size)


def _files(folder: Path, identity: str, manifest: Manifest, text: bytes) -> dict[str, WebFile]:
    """Return a bundle's files by URL path; raise OSError if one is missing, or lies outside of the folder."""
    path = f"{BUNDLES_PATH}/{identity}"
    found = {f"{path}/{MANIFEST_FILE}": WebFile(text, "application/json", identity, _HEADERS, private=True)}
    for name, entry in manifest.files.items():
        open_checked(folder / name, inside=folder).close()
        found[f"{path}/{name}"] = WebFile(
            folder / name, "application/octet-stream", entry.sha256, _HEADERS, private=True
        )
    return found
