"""Static files for browsers: a table of files, their responses, and limits on downloads."""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Message, Receive, Scope, Send

from moa_runtime.errors import MoaError
from moa_server.edge.connection_limits import END_KEY, network_of
from moa_server.edge.rate_limits import Clock, TokenBucket
from moa_server.metrics import Metrics

_log = logging.getLogger(__name__)

PIECE_BYTES = FileResponse.chunk_size

_WORTH_BYTES, _WORTH_PART = 1024, 0.9  # below that size, and above that part of it, gzip saves nothing
_STATIC = StaticFiles()  # for its conditions: a table says which files there are


#: Headers of all files: pages of other origins cannot embed them; those of --allow-origin may fetch them.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class ChangedError(MoaError):
    """A file has changed since the verifier started."""


@dataclass(frozen=True)
class WebFile:
    """A file that is served.

    Raises:
        OSError: it cannot be read.
    """

    content: Path | bytes  # its path, or its bytes
    media_type: str
    digest: str  # of its bytes, in letters, digits and dashes, for its ETag
    headers: Mapping[str, str] = field(default_factory=dict)  # besides SECURITY_HEADERS; names in lower case
    zipped: bytes | None = None  # its content in gzip; None if that saves too little
    private: bool = False  # for holders of a token
    _stat: os.stat_result | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.content, Path):
            object.__setattr__(self, "_stat", self.content.stat())

    def response(self, request: Headers) -> Response:
        """Make the response to a GET with these headers. Ranges refer to the file, never to its gzip.

        Raises:
            ChangedError: see :meth:`check`.
        """
        headers, sent = {**SECURITY_HEADERS, **self.headers, "etag": f'"{self.digest}"'}, self.content
        if self.zipped is not None:
            headers["vary"] = "accept-encoding"
            if "range" not in request and "gzip" in request.get("accept-encoding", ""):
                headers |= {"etag": f'"{self.digest}-gzip"', "content-encoding": "gzip"}
                sent = self.zipped
        response: Response
        if isinstance(sent, bytes):
            headers["content-length"] = str(len(sent))
            response = StreamingResponse(_pieces(sent), headers=headers, media_type=self.media_type)
        else:
            self.check()
            response = FileResponse(sent, headers=headers, media_type=self.media_type, stat_result=self._stat)
        return NotModifiedResponse(response.headers) if _STATIC.is_not_modified(response.headers, request) else response

    def check(self) -> None:
        """Raise ChangedError if the file has changed since the start."""
        if self._stat is None or not isinstance(self.content, Path):
            return
        try:
            found = self.content.stat()
        except OSError as error:
            text = f"{self.content} cannot be read: {error.strerror}; start moa-serve again"
            raise ChangedError(text, code="unreadable") from error
        if any(getattr(found, each) != getattr(self._stat, each) for each in ("st_size", "st_mtime_ns", "st_ino")):
            raise ChangedError(f"{self.content} has changed since moa-serve started: start it again", code="changed")


def zipped(data: bytes) -> bytes | None:
    """Compress reproducibly with gzip; return None if that saves less than a tenth."""
    if len(data) < _WORTH_BYTES:
        return None
    small = gzip.compress(data, 6, mtime=0)
    return small if len(small) < _WORTH_PART * len(data) else None


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


#: A download without progress for that many seconds, or below that rate (bytes a second) in the last such span, may be
#: ended for another.
_SPAN_S, _SLOW = 10.0, 32 << 10


class Download:
    """A download in progress; ``end`` closes its connection."""

    def __init__(self, network: str, began: float, end: Callable[[], None]) -> None:
        self.network, self.end = network, end
        self._last = self._span_began = began
        self._span_bytes = 0
        self._was_slow = False

    def sent(self, count: int, now: float) -> None:
        """Record ``count`` more bytes taken by the reader or the system's buffers.

        The system buffers megabytes at once even for a reader that stands still, so the average since the beginning
        says nothing.
        """
        took = now - self._span_began
        if took >= _SPAN_S:
            self._was_slow = self._span_bytes < _SLOW * took
            self._span_began, self._span_bytes = now, 0
        self._span_bytes += count
        self._last = now

    def slow(self, now: float) -> bool:
        """Whether it may be ended for another download."""
        return self._was_slow or now - self._last >= _SPAN_S


class Downloads:
    """The downloads under way: at most ``most``, and at most half of them of one network.

    When full, the oldest one slower than 32 KiB a second is ended for a new one, so slow readers cannot lock out
    others; an interrupted client continues with a range request.

    Args:
        most: downloads at once.
        bytes_per_second: of all downloads together. On a fast network a download of a hundred megabytes would
            otherwise occupy a processor for seconds that the target needs.
        clock: seconds, monotonic.
    """

    def __init__(self, most: int = 64, bytes_per_second: float = 32 << 20, clock: Clock = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._pace = TokenBucket(bytes_per_second, bytes_per_second / 8, clock)
        self._running: dict[Download, None] = {}  # for its order

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, network: str, end: Callable[[], None]) -> Download | None:
        """Start a download, to be ended with :meth:`over`; return None if none may start."""
        now = self._clock()
        rivals = [each for each in self._running if each.network == network]
        if len(rivals) < max(1, self.most // 2):
            rivals = list(self._running) if len(self._running) >= self.most else []
        if rivals:
            slow = next((each for each in rivals if each.slow(now)), None)
            if slow is None:
                return None
            self.over(slow)
            slow.end()
        begun = Download(network, now, end)
        self._running[begun] = None
        return begun

    def over(self, download: Download) -> None:
        """Note that a download has ended or is about to."""
        self._running.pop(download, None)

    def wait_s(self, download: Download, count: int) -> float:
        """Return the seconds to wait before sending its next ``count`` bytes; earlier bytes have been taken."""
        download.sent(count, self._clock())
        return self._pace.wait_s(count)


_RETRY_AFTER_S = 5


#: Returns the refusal of a request; None if it is allowed.
Refusal = Callable[[HTTPConnection], Response | None]


class Website(BaseRoute):
    """Serves files by URL path for GET and HEAD. Only files of the table are found, whatever is on the disk.

    Args:
        refusal: called before every answer with a file that is for everyone.
        unauthorized: the same for private files.
        metrics: records the number of downloads and the bytes sent.
    """

    def __init__(self, files: Mapping[str, WebFile], metrics: Metrics, refusal: Refusal, unauthorized: Refusal) -> None:
        self._files, self._metrics = files, metrics
        self._refusal, self._unauthorized = refusal, unauthorized
        self.downloads = Downloads()
        self._bytes = 0
        metrics.watch("moa_downloads", "Files that are being sent.", lambda: len(self.downloads))
        metrics.watch_count("moa_download_bytes", "Bytes of files sent.", lambda: self._bytes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = scope["type"] == "http" and scope["path"] in self._files
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request whose path is in the table."""
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        file, asked = self._files[scope["path"]], HTTPConnection(scope)
        if refused := (self._unauthorized if file.private else self._refusal)(asked):
            await refused(scope, receive, send)
            return
        download = None
        try:
            response = file.response(asked.headers)
            if scope["method"] == "HEAD":
                response = Response(None, response.status_code, response.headers)
            elif int(response.headers.get("content-length", 0)) > PIECE_BYTES:
                host = scope["client"][0] if scope.get("client") else ""
                download = self.downloads.begin(network_of(host), scope.get(END_KEY, lambda: None))
                if download is None:
                    self._metrics.refused("downloads")
                    response = self._unavailable("the verifier sends as many files as it can; try again later")
            await self._send(response, file, download, scope, receive, send)
        except ChangedError as error:
            _log.warning("%s", error)
            response = self._unavailable("the verifier's files have changed; it has to be started again")
            await response(scope, receive, send)
        finally:
            if download is not None:
                self.downloads.over(download)

    async def _send(
        self, response: Response, file: WebFile, download: Download | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send piece by piece, as fast as the reader takes them and the pace of all downloads allows.

        A response whose file changes while it is sent ends with its connection: the client asks for the rest again.
        """

        async def paced(message: Message) -> None:
            body = message.get("body", b"")
            if body and download is not None:
                await asyncio.sleep(self.downloads.wait_s(download, len(body)))
                if isinstance(response, FileResponse):
                    file.check()
            await send(message)
            self._bytes += len(body)

        try:
            await response(scope, receive, paced)
        except ChangedError as error:
            _log.warning("%s", error)
            scope.get(END_KEY, lambda: None)()  # some servers have no function to end a connection
            while (await receive())["type"] != "http.disconnect":
                pass

    def _unavailable(self, text: str) -> Response:
        return JSONResponse({"error": text}, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})
