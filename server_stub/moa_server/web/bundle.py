"""The bundle for the page: where it is, how it is made at the first start, and what of it is served."""

from __future__ import annotations

from pathlib import Path

from moa_runtime.auto_export import make_bundle
from moa_runtime.bundle import CHAT_TEMPLATE_FILE, MANIFEST_FILE, TOKENIZER_FILE, Bundle, BundleError, read_manifest
from moa_runtime.errors import MoaError
from moa_runtime.manifest import Fingerprints, Manifest
from moa_runtime.paths import cache_dir, default_bundle, expanded
from moa_server.web.files import WebFile
from moa_server.web.page import ASK_AGAIN, KEEP_NOTHING, SAFE, media_type, small_file

#: Where the bundle is served, with the paths of its folder.
BUNDLE_PATH = "/bundle/"
_TARGET = "web"


def find_bundle(named: Path | None, *, default_target: bool) -> Path:
    """The folder of a bundle with a graph for browsers, made now if need be.

    Args:
        named: by the user; None for the default bundle where that has such a graph, else one beside it.
        default_target: whether the verifier serves the built-in target with its drafter: for those, and where none was
            named, a bundle that is missing is exported, some minutes' work whose progress goes to stderr.

    Raises:
        MoaError: there is none; the message says which command makes one.
    """
    if named is not None:
        if not _for_browsers(read_manifest(expanded(named))):
            raise MoaError(
                f"the bundle {named} has no graph for browsers: export it again with --target {_TARGET}, "
                f"or several with commas, such as moa-export --target onnx,{_TARGET}"
            )
        return expanded(named)
    own = _made_here()
    for folder in (default_bundle(), own):
        if (folder / MANIFEST_FILE).exists() and _for_browsers(read_manifest(folder)):
            return folder
    if not default_target:
        raise MoaError(
            f"the page needs a bundle of this target: moa-export --target {_TARGET} --model NAME --drafter FOLDER "
            "--out BUNDLE makes one; name it with --bundle BUNDLE"
        )
    make_bundle(own, _TARGET, "moa-serve --web", "some minutes")
    return own


def bundle_files(folder: Path, served: Fingerprints) -> dict[str, WebFile]:
    """What a browser needs, by the path of its URL: manifest, tokenizer, template, and the graphs for browsers.

    Args:
        served: of the verifier.

    Raises:
        BundleError: it is damaged.
        MoaError: it belongs to another target or drafter.
    """
    bundle = Bundle.open(folder)  # a phone would find out what is damaged after a hundred megabytes
    manifest = bundle.manifest
    if manifest.fingerprints != served:
        if folder == _made_here():
            remedy = f"moa-export --target {_TARGET} --force --out {folder} makes it anew"
        else:
            remedy = f"moa-export --target {_TARGET} --out BUNDLE, with --model and --drafter as here, makes another; "
            remedy += "name it with --bundle"
        raise MoaError(f"the bundle {folder} belongs to another target or drafter than this verifier's; {remedy}")
    files: dict[str, WebFile] = {}
    try:
        for name in (MANIFEST_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
            files[BUNDLE_PATH + name] = small_file(folder / name, {"cache-control": ASK_AGAIN})
        for entry in (manifest.targets[_TARGET], manifest.web_writer):
            if entry is not None:
                # The page keeps them in a store of its own: a browser's cache would hold the same once more.
                headers = {**SAFE, "cache-control": KEEP_NOTHING}
                digest = manifest.files[entry.file].sha256
                graph = WebFile(folder / entry.file, media_type(entry.file), digest, headers)
                files[BUNDLE_PATH + entry.file] = graph
    except OSError as error:
        raise BundleError(f"the bundle {folder} cannot be read: {error.strerror or error}") from error
    return files


def _made_here() -> Path:
    """Where the bundle lies that is made at the first start."""
    return cache_dir() / "bundles" / _TARGET


def _for_browsers(manifest: Manifest) -> bool:
    return _TARGET in manifest.targets
