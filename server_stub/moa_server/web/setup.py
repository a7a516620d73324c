"""Setup of ``moa-serve --web``: files of the page, bundle, token, certificate, and the message to the operator."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moa_drafter.catalogue import default_drafter
from moa_drafter.target_source import DEFAULT_TARGET
from moa_page import page_folder
from moa_runtime.bundle import Bundle, make_bundle
from moa_runtime.errors import MoaError
from moa_runtime.manifest import (
    CHAT_TEMPLATE_FILE,
    LICENCES,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    BundleError,
    Fingerprints,
    read_manifest,
)
from moa_runtime.optional_deps import require_extra
from moa_runtime.options import DEFAULT_DRAFTER, WITHOUT_GRAPH
from moa_runtime.paths import cache_dir, data_dir, default_bundle, expanded
from moa_runtime.sockets import is_loopback
from moa_server.settings import ServeError, Settings
from moa_server.web.pairing import AUTHORITY_PATH, hosts_of, invitation, kept_token, page_urls
from moa_server.web.site import WebFile, zipped

if TYPE_CHECKING:
    from moa_server.web.certificate import OwnCertificate

INDEX = "index.html"
#: Folder of the files whose names change with their bytes.
HASHED = "assets/"

#: Content Security Policy of the page: its own files, WebAssembly compiled from them, and its verifier. ``'self'`` of
#: ``connect-src`` includes ws and wss of the same host and port (CSP 3).
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; font-src 'self'; connect-src 'self'; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

IMMUTABLE, REVALIDATE, NO_STORE = "public, max-age=31536000, immutable", "no-cache", "no-store"

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".jinja": "text/plain; charset=utf-8",
    ".json": "application/json",
    ".webmanifest": "application/manifest+json",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_PACKED = {".png"}  # already compressed


def media_type(name: str) -> str:
    """Return the media type for a file name; ``application/octet-stream`` for an unknown suffix."""
    return _MEDIA_TYPES.get(Path(name).suffix.lower(), "application/octet-stream")


def small_file(path: Path, headers: Mapping[str, str]) -> WebFile:
    """Make a file of the table; its gzip is kept in memory if it is smaller.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    small = None if path.suffix.lower() in _PACKED else zipped(data)
    return WebFile(path, media_type(path.name), hashlib.sha256(data).hexdigest(), headers, small)


def page_files(folder: Path) -> dict[str, WebFile]:
    """Return the built page's files by URL path, its index also at ``/``, without hidden files.

    Files that change while the verifier runs are refused: a page with files of two builds would not start.

    Raises:
        MoaError: the folder has no page, or cannot be read.
    """
    files: dict[str, WebFile] = {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
                caching = IMMUTABLE if name.startswith(HASHED) else REVALIDATE
                headers = {"cache-control": caching, "content-security-policy": POLICY}
                files[f"/{name}"] = small_file(path, headers)
    except OSError as error:
        raise MoaError(f"the page in {folder} cannot be read: {error.strerror or error}", code="unreadable") from error
    if f"/{INDEX}" not in files:
        raise MoaError(f"there is no page in {folder}: it has no {INDEX}", code="page_missing")
    return {"/": files[f"/{INDEX}"], **files}


#: URL path of the bundle, followed by the paths of its folder.
BUNDLE_PATH = "/bundle/"
_TARGET = "web"


def find_bundle(named: Path | None, *, default_target: bool, plain: str | None = None) -> Path:
    """Return the folder of a bundle for browsers, with a graph for them or without any, making it if necessary.

    Args:
        named: by the user; None for the default bundle if it has such a graph, otherwise one beside it.
        default_target: whether the verifier serves the built-in target with its drafter: for those, and where none was
            named, a bundle that is missing is made, some seconds' work whose progress goes to stderr.
        plain: the target, if it is served without a drafter: where none was named its bundle has no graph.

    Raises:
        MoaError: there is none; the message says which command makes one.
    """
    if named is not None:
        if not _for_browsers(expanded(named)):
            text = f"the bundle {named} has no graph for browsers: export it with --target {_TARGET} or onnx,{_TARGET}"
            raise MoaError(text, code="no_web_graph")
        return expanded(named)
    if plain is not None:
        from moa_export.plain_bundle import cached_plain_bundle  # late: the page alone needs it

        return cached_plain_bundle(plain)
    for folder in (default_bundle(), _made_here()):
        if (folder / MANIFEST_FILE).exists() and _for_browsers(folder):
            return folder
    if not default_target:
        raise MoaError(
            f"the page needs a bundle of this target: moa-export --target {_TARGET} --model NAME --drafter FOLDER "
            "--out BUNDLE makes one; name it with --bundle BUNDLE",
            code="no_bundle",
        )
    make_bundle(_made_here(), _TARGET, "moa-serve --web")
    return _made_here()


def bundle_files(folder: Path, served: Fingerprints) -> dict[str, WebFile]:
    """Return the bundle's files for browsers by URL path: manifest, tokenizer, template, licences and graphs.

    Raises:
        BundleError: it is damaged.
        MoaError: it belongs to another target or drafter than ``served``, the verifier's.
    """
    bundle = Bundle.open(folder)  # a phone would find out what is damaged after a hundred megabytes
    manifest = bundle.manifest
    if manifest.fingerprints != served:
        if folder == _made_here():
            remedy = f"moa-export --target {_TARGET} --force --out {folder} makes it anew"
        else:
            remedy = f"moa-export --target {_TARGET} --out BUNDLE, with --model and --drafter as here, makes another; "
            remedy += "name it with --bundle"
        text = f"the bundle {folder} belongs to another target or drafter than this verifier's; {remedy}"
        raise MoaError(text, code="other_target")
    files: dict[str, WebFile] = {}
    try:
        licences = (name for name in manifest.files if name.startswith(f"{LICENCES}/"))
        for name in (MANIFEST_FILE, TOKENIZER_FILE, CHAT_TEMPLATE_FILE, *licences):
            files[BUNDLE_PATH + name] = small_file(folder / name, {"cache-control": REVALIDATE})
        for entry in (manifest.targets.get(_TARGET), manifest.web_writer):
            if entry is not None:
                # The page keeps them in a store of its own: a browser's cache would hold the same once more.
                digest, headers = manifest.files[entry.file].sha256, {"cache-control": NO_STORE}
                graph = WebFile(folder / entry.file, media_type(entry.file), digest, headers)
                files[BUNDLE_PATH + entry.file] = graph
    except OSError as error:
        text = f"the bundle {folder} cannot be read: {error.strerror or error}"
        raise BundleError(text, code="unreadable") from error
    return files


def _made_here() -> Path:
    """Return the folder of the bundle that is made at the first start."""
    return cache_dir() / "bundles" / _TARGET


def _for_browsers(bundle: Path) -> bool:
    manifest = read_manifest(bundle)
    return _TARGET in manifest.targets or manifest.architecture in WITHOUT_GRAPH


#: Value of ``--tls-cert``: make a certificate.
AUTO = Path("auto")


class WebSetup:
    """Everything that ``--web`` brings, made from the command line's options.

    Attributes:
        settings: those given, with the kept token if other machines can connect and no token was given.
        tls: certificate and key that were made; None without ``--tls-cert auto``.
        fingerprint: SHA-256 of the authority that a phone must trust; None if none was made.
        bundle: the folder that :meth:`find_bundle` found; None before.

    Raises:
        MoaError: the page is not built, or nothing can be kept in the data folder.
    """

    def __init__(self, options: argparse.Namespace, settings: Settings) -> None:
        self._options, self.settings = options, settings
        self._page = page_files(page_folder())
        self._token_from = ""
        if settings.token:
            self._token_from = "that of --token or MOA_TOKEN"
        elif settings.token_file:
            self._token_from = f"one of those in {settings.token_file}"
        elif not is_loopback(options.host) and not options.insecure:
            file = _folder() / "token"
            self.settings = dataclasses.replace(settings, token=kept_token(file))
            self._token_from = f"the one that is kept in {file}"
        self._own = self.renew() if options.tls_cert == AUTO else None
        self.tls = None if self._own is None else (self._own.file, self._own.file)
        self.fingerprint = None if self._own is None else self._own.fingerprint
        self.bundle: Path | None = None

    def renew(self) -> OwnCertificate:
        """Return the certificate of ``--tls-cert auto``, renewed if it is about to expire.

        Raises:
            MoaError: it cannot be kept.
        """
        require_extra("web", "--tls-cert auto")
        from moa_server.web.certificate import own_certificate

        return own_certificate(_folder(), hosts_of(self._options.host))

    def find_bundle(self) -> None:
        """Find or make the bundle, before the target takes its memory.

        Raises:
            MoaError: there is no bundle, and none can be made.
        """
        options = self._options
        model, drafter = options.model, options.drafter
        built_in = model is None and drafter in (None, DEFAULT_DRAFTER)
        named = drafter or default_drafter(model or DEFAULT_TARGET)
        without = named is None or named in WITHOUT_GRAPH
        self.bundle = find_bundle(options.bundle, default_target=built_in, plain=model if without else None)

    def files(self, served: Fingerprints) -> Mapping[str, WebFile]:
        """Return all served files by URL path; call :meth:`find_bundle` before.

        Raises:
            MoaError: the bundle is damaged, or belongs to another target or drafter.
        """
        assert self.bundle is not None
        files = {**self._page, **bundle_files(self.bundle, served)}
        if self._own is not None:
            digest, headers = hashlib.sha256(self._own.authority).hexdigest(), {"cache-control": REVALIDATE}
            files[AUTHORITY_PATH] = WebFile(self._own.authority, "application/x-x509-ca-cert", digest, headers)
        return files

    def urls(self, port: int) -> list[str]:
        """Return the URLs of the page, the best one first."""
        scheme = "https" if self._options.tls_cert else "http"
        return page_urls(scheme, hosts_of(self._options.host), port)

    def invitation(self, port: int) -> str:
        """Return the message to the operator, with a QR code if stdout is a terminal that can show one."""
        encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
        drawn, secure = sys.stdout.isatty() and encoding == "utf8", bool(self._options.tls_cert)
        token = {"token": self.settings.token, "token_from": self._token_from}
        return invitation(self.urls(port), **token, fingerprint=self.fingerprint, secure=secure, drawn=drawn)


def check_web_options(options: argparse.Namespace) -> None:
    """Raise ServeError for options of ``--web`` without it, and options that exclude each other."""
    if options.tls_cert == AUTO and options.tls_key:
        raise ServeError("--tls-cert auto makes its own key: leave --tls-key out", code="options_conflict")
    if not options.web and options.tls_cert == AUTO:
        raise ServeError("--tls-cert auto belongs to --web, which says what has to trust it", code="needs_web")


def _folder() -> Path:
    """Return the folder of token and certificate."""
    return data_dir() / "web"
