"""Bundles from a verifier: which it offers, and the download of what fits this device.

A verifier lists its bundles at ``/v1/bundles`` and serves their files below that path, to holders of its token. A
bundle is a stranger's file: its manifest is read with limits, and nothing else is opened before its size and SHA-256
are those of the manifest. A download that was interrupted continues where it ended, in this program or a later one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path, PurePosixPath
from typing import Any, cast
from urllib.parse import quote

from moa_runtime.address import Address
from moa_runtime.atomic_file import lock, open_private, replace_private
from moa_runtime.checked_file import read_checked_text, sha256_of
from moa_runtime.errors import MoaError, reason_of
from moa_runtime.manifest import (
    MANIFEST_FILE,
    BundleError,
    Fingerprints,
    Manifest,
    TargetEntry,
    checked_count,
    checked_manifest,
    read_manifest,
)
from moa_runtime.paths import cache_dir, check_cache
from moa_runtime.transport import Endpoint, status_error, tls_error

#: Path of the list; files of a bundle are at ``/v1/bundles/ID/NAME``.
BUNDLES_PATH = "/v1/bundles"
_MOST_LIST_BYTES, _MOST_MANIFEST_BYTES, _MOST_FILES = 1 << 20, 1 << 24, 1000
#: The list is asked for at each start, perhaps without a network.
_LIST_TIMEOUT_S, _TIMEOUT_S = 5.0, 20.0
#: In which a header, a list or a manifest must be whole: one that comes byte by byte exceeds no timeout of a socket.
_WHOLE_S = 20.0
_ATTEMPTS, _BACKOFF_S = 6, 0.5
_PIECE_BYTES = 1 << 18
_INDEX = "index.json"
#: Type and version with which a server answers what is no TLS, decoded like a status line.
_TLS_ALERT = "\x15\x03"

#: Called with the bytes that are here and those of the whole download. What it raises ends the download; what came is
#: kept.
Progress = Callable[[int, int], None]


class DownloadError(MoaError):
    """A bundle that a verifier does not offer, or that could not be brought here; what came is kept."""


class NotOfferedError(DownloadError):
    """The verifier offers no bundle that fits."""


@dataclass(frozen=True)
class Offer:
    """A bundle that a verifier offers.

    Attributes:
        id: SHA-256 of its manifest, hexadecimal.
        target: name of the target, for messages.
        architecture: of the drafter, see :class:`moa_runtime.manifest.Manifest`.
        graphs: names of its graphs, such as ``onnx``.
        bytes: of all its files.
    """

    id: str
    fingerprints: Fingerprints
    target: str
    architecture: str
    graphs: tuple[str, ...]
    bytes: int

    @classmethod
    def from_json(cls, raw: Any) -> Offer:
        """Read an entry of the list; raise KeyError, TypeError or ValueError if it is malformed."""
        identity = str(raw["id"])
        if len(identity) != 64 or set(identity) - set("0123456789abcdef"):
            raise ValueError(f"{identity[:80]!r} is no SHA-256")
        prints = {name: str(raw["fingerprints"][name]) for name in ("target", "tokenizer", "drafter")}
        graphs = tuple(str(name) for name in raw["graphs"])
        texts = str(raw["target"]), str(raw["architecture"])
        return cls(identity, Fingerprints(**prints), *texts, graphs, checked_count(raw["bytes"]))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def offers(endpoint: Endpoint) -> list[Offer]:
    """Return the bundles that a verifier offers, the best first.

    Raises:
        NotOfferedError: it offers none.
        DownloadError: it cannot be reached (code ``unreachable``), refuses the token, or answers something else.
    """
    listed = _Verifier(endpoint, _LIST_TIMEOUT_S).whole(BUNDLES_PATH, _MOST_LIST_BYTES)
    try:
        found = [Offer.from_json(raw) for raw in json.loads(listed)["bundles"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"{endpoint.address} is no moa-edge verifier: its list of bundles is malformed"
        raise DownloadError(text, code="malformed") from error
    if not found:
        raise NotOfferedError(f"the verifier at {endpoint.address} offers no bundle", code="no_bundle")
    return found


def best_offer(found: Sequence[Offer], graphs: Sequence[str] = ("onnx",)) -> Offer:
    """Return the first offer with one of these graphs, else the first without; raise NotOfferedError if none fits."""
    fitting = [one for one in found if set(one.graphs) & set(graphs)] or [one for one in found if not one.graphs]
    if not fitting:
        text = f"none of the verifier's bundles has a graph for this device ({', '.join(graphs)})"
        raise NotOfferedError(text, code="no_graph")
    return fitting[0]


def fetch_bundle(
    endpoint: Endpoint,
    offer: Offer,
    *,
    graphs: Sequence[str] = ("onnx",),
    writer: bool = True,
    progress: Progress = lambda received, total: None,
) -> Path:
    """Return the folder of a verifier's bundle with the files that this device needs; those that are missing are
    downloaded. It may hold more, for another program.

    Args:
        graphs: names of graphs that this device can run.
        writer: whether to bring the offline writer too.

    Raises:
        DownloadError: it cannot be downloaded; what came is kept, and the next call continues.
        BundleError: what the verifier sent is no bundle, or a file of the bundle here is damaged.
        MoaError: nothing can be written into the cache folder.
    """
    place = _shelf() / offer.id[:32]
    if not place.exists():
        check_cache()
    try:
        _make_folder(place.parent)
        with _alone(place.with_name(f"{place.name}.lock")):
            held = read_manifest(place) if (place / MANIFEST_FILE).exists() else None
            if held is None or not _holds(held, set(graphs) & set(offer.graphs), writer):
                _Download(_Verifier(endpoint), offer, place, held).run(graphs, writer, progress)
        checked_manifest(place)
        _note_use(endpoint, place.name)
    except OSError as error:
        text = f"the bundle cannot be kept in {place.parent}: {reason_of(error)}; what came stays there"
        raise DownloadError(text, code="unwritable") from error
    except BundleError:
        shutil.rmtree(place, ignore_errors=True)  # changed since it was checked: the next call brings it again
        raise
    return place


def kept_bundle(endpoint: Endpoint) -> Path | None:
    """Return the folder of the bundle that was last used with this address, without asking; None if there is none."""
    name = _index().get(_key(endpoint))
    place = _shelf() / name if name else None
    return place if place is not None and (place / MANIFEST_FILE).exists() else None


class _Verifier:
    """GET requests to a verifier. Redirections are not followed, since the token is for this verifier alone."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = _TIMEOUT_S) -> None:
        self._endpoint, self.address, self._timeout_s = endpoint, endpoint.address, timeout_s
        proxies = {name: proxy for name in ("http", "https") if (proxy := endpoint.proxy)}
        if any(proxy.startswith("socks") for proxy in proxies.values()):
            text = "the proxy that the environment names is a SOCKS proxy, through which bundles cannot be downloaded"
            raise DownloadError(f"{text}: set no_proxy, or copy the bundle and name it with --bundle", code="bad_proxy")
        self._sockets: list[socket.socket] = []
        handlers = [urllib.request.ProxyHandler(proxies), _NoRedirect(), _Http(self._sockets)]
        if (context := endpoint.context) is not None:
            handlers.append(_Https(self._sockets, context))
        self._opener = urllib.request.build_opener(*handlers)

    @contextlib.contextmanager
    def opened(self, path: str, start: int = 0) -> Iterator[HTTPResponse]:
        """Open a resource from byte ``start`` on. Raises DownloadError: with the code ``unreachable`` another attempt
        may succeed."""
        headers = self._endpoint.authorization | ({"Range": f"bytes={start}-"} if start else {})
        request = urllib.request.Request(Address.parse(self._endpoint.url).at(path), headers=headers)
        try:
            with self._open(request, path) as response:
                yield response
        finally:
            while self._sockets:
                self._sockets.pop().close()

    def _open(self, request: urllib.request.Request, path: str) -> HTTPResponse:
        try:
            with self._ended_after(_WHOLE_S):
                response: HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
            return response
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, path) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            cause = reason if isinstance(reason, BaseException) else error
            raise self.cut(cause) from cause

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Iterator[None]:
        """End the connection if the block takes longer."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def read(self, response: HTTPResponse, most: int) -> bytes:
        """Return what has come of a response, at most ``most`` bytes, none at its end; raise DownloadError."""
        try:
            return response.read1(most)
        except (OSError, HTTPException) as error:
            raise self.cut(error) from error

    def whole(self, path: str, most: int) -> bytes:
        """Return the content of a resource that has at most ``most`` bytes; raise DownloadError."""
        content = b""
        with self._ended_after(_WHOLE_S), self.opened(path) as response:
            while len(content) <= most and (piece := self.read(response, _PIECE_BYTES)):
                content += piece
        if len(content) > most:
            text = f"{self.address} is no moa-edge verifier: its answer has more than {most} bytes"
            raise DownloadError(text, code="malformed")
        return content

    def cut(self, cause: BaseException) -> DownloadError:
        """Return the error of a connection that could not be made, or has ended."""
        if error := tls_error(self.address, cause):
            return DownloadError(str(error), code=error.code)
        if isinstance(cause, BadStatusLine) and str(cause).startswith(_TLS_ALERT):
            return DownloadError(f"{self.address} speaks TLS: use wss://", code="needs_tls")
        why = reason_of(cause) if isinstance(cause, OSError) else str(cause).strip() or type(cause).__name__
        if isinstance(cause, TimeoutError):
            why += ": it may still be starting"
        return DownloadError(f"the verifier at {self.address} cannot be reached: {why}", code="unreachable")

    def _refused(self, status: int, path: str) -> DownloadError:
        if status == HTTPStatus.NOT_FOUND and path != BUNDLES_PATH:  # of a bundle that was in the list
            return _changed()
        error = status_error(self.address, status, token=bool(self._endpoint.token))
        return DownloadError(str(error), code=error.code if error.final else "unreachable")


def _watched(kind: type[HTTPConnection], sockets: list[socket.socket], *args: Any, **options: Any) -> HTTPConnection:
    """Make a connection; a duplicate of its socket is added to ``sockets`` before the handshake of TLS."""
    made: Any = kind(*args, **options)

    def connect(*where: Any) -> socket.socket:
        opened = socket.create_connection(*where)
        sockets.append(opened.dup())
        return opened

    made._create_connection = connect
    return cast(HTTPConnection, made)


def _changed() -> DownloadError:
    return DownloadError("the verifier's bundle has changed meanwhile: try again", code="changed")


class _Http(urllib.request.HTTPHandler):
    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__()
        self._kind: Any = partial(_watched, HTTPConnection, sockets)

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._kind, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, sockets: list[socket.socket], tls: ssl.SSLContext) -> None:
        super().__init__()
        self._kind: Any = partial(_watched, HTTPSConnection, sockets)
        self._tls = tls

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._kind, req, context=self._tls)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow none; the redirection is then an HTTPError."""


def _holds(held: Manifest, graphs: set[str], writer: bool) -> bool:
    """Return whether a bundle has all that is wanted of it; a missing writer may be one that the verifier lacks."""
    return graphs <= set(held.targets) and (held.writer is not None or not writer)


class _Download:
    """The download of one bundle into ``place``, by way of a folder beside it. ``held``: what is there already; other
    programs may be using it, so nothing of it changes."""

    def __init__(self, verifier: _Verifier, offer: Offer, place: Path, held: Manifest | None) -> None:
        self._verifier, self._offer, self._place, self._here = verifier, offer, place, held
        self._part = place.with_name(f"{place.name}.part")
        self._path = f"{BUNDLES_PATH}/{offer.id}"

    def run(self, graphs: Collection[str], writer: bool, progress: Progress) -> None:
        manifest = self._manifest()
        if len(manifest.files) > _MOST_FILES:
            raise BundleError(f"the verifier's bundle has {len(manifest.files)} files", code="damaged")
        if self._here is not None:
            graphs, writer = [*graphs, *self._here.targets], writer or self._here.writer is not None
        manifest = fitting(manifest, graphs, writer=writer)
        if manifest == self._here:
            return
        self._part.mkdir(mode=0o700, exist_ok=True)
        self._remove_others(manifest)
        total = sum(entry.bytes for entry in manifest.files.values())
        here = sum(self._held(name) for name in manifest.files)
        free = shutil.disk_usage(self._part).free
        if total - here > free:
            text = f"the bundle needs {_mb(total - here)} in {self._place.parent}, where {_mb(free)} are free"
            raise DownloadError(f"{text}: free some, or set MOA_EDGE_CACHE to a larger disk", code="disk_full")
        missing = [name for name in manifest.files if not self._is_here(name)]
        for name in missing:
            self._file(name, manifest, progress, total)
        _make_folder(self._place)
        for name in missing:
            (self._place / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._part / name).replace(self._place / name)
        # Last, and at once: a folder with a manifest is complete.
        replace_private(self._place / MANIFEST_FILE, [manifest.to_json().encode()])
        shutil.rmtree(self._part)

    def _manifest(self) -> Manifest:
        text = self._verifier.whole(f"{self._path}/{MANIFEST_FILE}", _MOST_MANIFEST_BYTES)
        if hashlib.sha256(text).hexdigest() != self._offer.id:
            raise _changed()
        return Manifest.from_json(text.decode("utf-8", "replace"))

    def _remove_others(self, manifest: Manifest) -> None:
        """Remove what an earlier download of other files has left."""
        for path in self._part.rglob("*"):
            if path.is_file() and path.relative_to(self._part).as_posix() not in manifest.files:
                path.unlink()

    def _is_here(self, name: str) -> bool:
        return self._here is not None and name in self._here.files

    def _held(self, name: str) -> int:
        path = (self._place if self._is_here(name) else self._part) / name
        return path.stat().st_size if path.is_file() else 0

    def _file(self, name: str, manifest: Manifest, progress: Progress, total: int) -> None:
        """Bring one file to its end, over as many connections as it takes."""
        path, entry, failures, most = self._part / name, manifest.files[name], 0, 0
        before = sum(self._held(other) for other in manifest.files if other != name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._held(name) > entry.bytes:
            path.unlink()
        while not path.exists() or self._held(name) < entry.bytes:
            try:
                for held in self._pieces(name, path, entry.bytes):
                    failures, most = (0, held) if held > most else (failures, most)  # a file may begin anew
                    progress(before + held, total)
            except DownloadError as error:
                failures += 1
                if error.code != "unreachable" or failures >= _ATTEMPTS:
                    kept = f"{_mb(before + self._held(name))} of {_mb(total)} are kept for the next attempt"
                    raise DownloadError(f"{error}; {kept}", code=error.code) from error
                time.sleep(_BACKOFF_S * 2 ** (failures - 1))
                progress(before + self._held(name), total)  # which may end the download
        if sha256_of(path) != entry.sha256:
            path.unlink()
            raise DownloadError(f"{name} came damaged from the verifier: try again", code="damaged")

    def _pieces(self, name: str, path: Path, most: int) -> Iterator[int]:
        """Add to a file what is missing of it; yield its size after each piece."""
        held = self._held(name)
        with self._verifier.opened(f"{self._path}/{quote(name)}", held) as response, path.open("ab") as file:
            if held and response.status != HTTPStatus.PARTIAL_CONTENT:
                file.truncate(0)
                held = 0
            while held < most:
                piece = self._verifier.read(response, min(_PIECE_BYTES, most - held))
                if not piece:
                    raise self._verifier.cut(EOFError("the connection was closed early"))
                file.write(piece)
                file.flush()
                held += len(piece)
                yield held


def fitting(manifest: Manifest, graphs: Collection[str], *, writer: bool) -> Manifest:
    """Return a manifest of the files that a device needs: texts, licences, its graph, and the writer if asked for."""
    chosen = {name: entry for name, entry in manifest.targets.items() if name in graphs}
    kept = [*chosen.values(), *([manifest.writer] if writer and manifest.writer else [])]
    every = [*manifest.targets.values(), *manifest.writers.values()]
    files = {name: entry for name, entry in manifest.files.items() if _belongs(name, kept) or not _belongs(name, every)}
    writers: dict[str, Any] = dict.fromkeys(manifest.writers) | ({"writer": manifest.writer} if writer else {})
    return dataclasses.replace(manifest, targets=chosen, files=files, **writers)


def _belongs(name: str, graphs: Sequence[TargetEntry]) -> bool:
    paths = {PurePosixPath(name), *PurePosixPath(name).parents}
    return any(PurePosixPath(entry.file) in paths for entry in graphs)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for another program that brings the same bundle; it ends, or is ended, at some time."""
    with open_private(path) as file:
        while True:
            try:
                lock(file)
            except (BlockingIOError, PermissionError):
                time.sleep(_BACKOFF_S)
            else:
                break
        yield


# -- which bundle is used with which verifier ------------------------------------------------------


def _shelf() -> Path:
    """The folder of fetched bundles, one folder for each."""
    return cache_dir() / "bundles" / "fetched"


def _key(endpoint: Endpoint) -> str:
    return endpoint.address


def _index() -> dict[str, str]:
    """Return the folders' names by address; none if the file is missing or damaged."""
    try:
        found = json.loads(read_checked_text(_shelf() / _INDEX, inside=_shelf()))
        return {str(address): PurePosixPath(str(name)).name for address, name in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _note_use(endpoint: Endpoint, name: str) -> None:
    """Note that an address uses a bundle, and remove bundles that no address uses any more."""
    known = _index()
    if known.get(_key(endpoint)) == name:
        return
    known[_key(endpoint)] = name
    replace_private(_shelf() / _INDEX, [json.dumps(known, indent=1).encode()])
    for folder in _shelf().iterdir():
        if folder.is_dir() and folder.name.removesuffix(".part") not in known.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_name(f"{folder.name.removesuffix('.part')}.lock").unlink(missing_ok=True)
