"""The page as files to serve: which ones, and with what headers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_server.web.files import WebFile, zipped

INDEX = "index.html"
#: Folder of the files whose names change with their bytes.
HASHED = "assets/"

#: What the page may load and run. Its own files alone, WebAssembly compiled from them, and the verifier they came from:
#: ``'self'`` of ``connect-src`` includes ws and wss of the same host and port (CSP 3).
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "worker-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

#: Of all that browsers load. Pages of other origins can embed nothing of it; those of --allow-origin may fetch it.
SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}

FOREVER, ASK_AGAIN, KEEP_NOTHING = "public, max-age=31536000, immutable", "no-cache", "no-store"

_TEXT = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".txt": "text/plain",
    ".jinja": "text/plain",
}
_OTHER = {
    ".json": "application/json",
    ".map": "application/json",
    ".webmanifest": "application/manifest+json",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
}
_PACKED = {".png", ".webp", ".woff2"}  # gzip finds nothing in them


def media_type(name: str) -> str:
    """By the ending of a file's name; ``application/octet-stream`` of one that is not known."""
    suffix = Path(name).suffix.lower()
    if suffix in _TEXT:
        return f"{_TEXT[suffix]}; charset=utf-8"
    return _OTHER.get(suffix, "application/octet-stream")


def small_file(path: Path, headers: Mapping[str, str]) -> WebFile:
    """A file of the disk, whose gzip is kept in memory if it pays.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    small = None if path.suffix.lower() in _PACKED else zipped(data)
    return WebFile(path, media_type(path.name), hashlib.sha256(data).hexdigest(), {**SAFE, **headers}, small)


def page_files(folder: Path) -> dict[str, WebFile]:
    """The built page's files by the path of their URL; its first one also at ``/``. Hidden files are left out.

    A file that is built anew while the verifier runs is refused: a page with files of two builds would not start.

    Raises:
        MoaError: the folder has no page, or cannot be read.
    """
    files: dict[str, WebFile] = {}
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
                caching = FOREVER if name.startswith(HASHED) else ASK_AGAIN
                headers = {"cache-control": caching, "content-security-policy": POLICY}
                files[f"/{name}"] = small_file(path, headers)
    except OSError as error:
        raise MoaError(f"the page in {folder} cannot be read: {error.strerror or error}") from error
    if f"/{INDEX}" not in files:
        raise MoaError(f"there is no page in {folder}: it has no {INDEX}")
    return {"/": files[f"/{INDEX}"], **files}
