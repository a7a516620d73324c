"""The part of the app that browsers load: a table of files, open to everybody, and how they are sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from moa_server.edge.connection_limits import END_KEY, network_of
from moa_server.metrics import Metrics
from moa_server.web.downloads import Download, Downloads
from moa_server.web.files import ChangedError, Content, Reply, WebFile

_PIECE = 64 << 10  # what waits for a slow reader, and what the event loop does at once for a fast one
_RETRY_AFTER_S = 5

_log = logging.getLogger(__name__)

#: Why a request may not be answered; None where it may.
Refusal = Callable[[Headers], Response | None]


class Website(BaseRoute):
    """Files by the path of their URL, for GET and HEAD. What is not in the table is not found, whatever is on the disk.

    Args:
        refusal: asked before every answer.
        metrics: gets the number of downloads, and the bytes sent.
    """

    def __init__(self, files: Mapping[str, WebFile], metrics: Metrics, refusal: Refusal) -> None:
        self._files, self._refusal, self._metrics = files, refusal, metrics
        self.downloads = Downloads()
        self._bytes = 0
        # Of its own, so that a slow disk holds up nobody else's threads; one thread gives each download its turn.
        self._disk = ThreadPoolExecutor(1, "downloads")
        metrics.watch("moa_downloads", "Files that are being sent.", lambda: len(self.downloads))
        metrics.watch_count("moa_download_bytes", "Bytes of files sent.", lambda: self._bytes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = scope["type"] == "http" and scope["path"] in self._files
        return (Match.FULL if found else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request whose path is in the table."""
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        asked = Headers(scope=scope)
        if refused := self._refusal(asked):
            await refused(scope, receive, send)
            return
        file, head = self._files[scope["path"]], scope["method"] == "HEAD"
        reply = file.reply({name: value for name, value in asked.items() if not (head and name == "range")})
        if head or reply.content is None:
            await Response(status_code=reply.status, headers=reply.headers)(scope, receive, send)
        elif reply.stop - reply.start <= _PIECE:
            await self._send(reply, None, scope, receive, send)
        else:
            host = scope["client"][0] if scope.get("client") else ""
            download = self.downloads.begin(network_of(host), scope.get(END_KEY, _nothing))
            if download is None:
                self._metrics.refused("downloads")
                text = "the verifier sends as many files as it can; try again later"
                await self._unavailable(text)(scope, receive, send)
                return
            try:
                await self._send(reply, download, scope, receive, send)
            finally:
                self.downloads.over(download)

    def close(self) -> None:
        """Answer nothing more."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _send(self, reply: Reply, download: Download | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Piece by piece, as fast as the reader takes them. What was cut off is for the client to ask for again."""
        assert reply.content is not None
        content, at = reply.content, reply.start
        left = asyncio.ensure_future(_left(receive))
        try:
            piece = await self._read(content, at, reply.stop, download)
            headers = [(name.encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            while not left.done():
                at += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": at < reply.stop})
                self._bytes += len(piece)
                if at >= reply.stop:
                    return
                piece = await self._read(content, at, reply.stop, download)
        except ChangedError as error:
            _log.warning("%s", error)
            if at == reply.start:
                await self._unavailable("the verifier's files have changed; it has to be started again")(
                    scope, receive, send
                )
            else:
                scope.get(END_KEY, _nothing)()
                await left
        finally:
            left.cancel()

    async def _read(self, content: Content, at: int, stop: int, download: Download | None) -> bytes:
        count = min(_PIECE, stop - at)
        if download is not None:
            await asyncio.sleep(self.downloads.wait_s(download, count))
        return await asyncio.get_running_loop().run_in_executor(self._disk, content.read, at, count)

    def _unavailable(self, text: str) -> Response:
        return JSONResponse({"error": text}, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


async def _left(receive: Receive) -> None:
    """Until the client has left, or was answered."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _nothing() -> None:
    """In place of the end of a connection, where the server offers none."""
