"""The part of the app that browsers load: a table of files, open to everybody, and how they are sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from moa_server.edge.connection_limits import END_KEY, network_of
from moa_server.metrics import Metrics
from moa_server.web.downloads import Download, Downloads
from moa_server.web.files import PIECE_BYTES, ChangedError, WebFile

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
        file, download = self._files[scope["path"]], None
        try:
            response = file.response(asked)
            if scope["method"] == "HEAD":
                response = Response(None, response.status_code, response.headers)
            elif int(response.headers.get("content-length", 0)) > PIECE_BYTES:
                host = scope["client"][0] if scope.get("client") else ""
                download = self.downloads.begin(network_of(host), scope.get(END_KEY, _nothing))
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
            scope.get(END_KEY, _nothing)()
            while (await receive())["type"] != "http.disconnect":
                pass

    def _unavailable(self, text: str) -> Response:
        return JSONResponse({"error": text}, 503, headers={"Retry-After": str(_RETRY_AFTER_S)})


def _nothing() -> None:
    """In place of the end of a connection, where the server offers none."""
