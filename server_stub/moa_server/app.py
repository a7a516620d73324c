"""The verifier as an ASGI app: sessions over WebSocket, plain decoding, health and a page over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from moa_runtime.sockets import host_allowed, names_address, origin_allowed, own_origin
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.auth import SESSION_SUBPROTOCOL, Authenticator, Bearer, SubprotocolError, authorization_of
from moa_server.background_answers import BackgroundAnswers
from moa_server.connection import Connection
from moa_server.decoding import PlainDecodingEndpoint
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.base import Engine
from moa_server.error_middleware import ErrorMiddleware
from moa_server.logging import add_log_fields
from moa_server.metrics import Metrics
from moa_server.scheduling.worker import Worker
from moa_server.sessions import SessionStore
from moa_server.settings import Settings
from moa_server.web.site import WebFile, Website

SESSION_PATH, DECODE_PATH, STATUS_PATH = "/v1/session", "/v1/decode", "/v1/status"
HEALTH_PATH, READY_PATH, METRICS_PATH = "/healthz", "/readyz", "/metrics"

_SWEEP_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Verifier:
    """A loaded engine with everything its connections share, as an ASGI app.

    Attributes:
        app: the ASGI app.
        store: the conversations.
        worker: runs the jobs of all connections.
        website: the page and its bundle; None if no page is served.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        timeline: Timeline = NO_TIMELINE,
        drafts: ServerDrafting | None = None,
        files: Mapping[str, WebFile] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.engine, self.timeline, self.drafts = settings, engine, timeline, drafts
        self.metrics = Metrics()
        self.worker = Worker(engine, self.metrics, settings.step_tokens, clock)
        self.background_answers = BackgroundAnswers(self.worker, self.metrics, settings)
        self.authenticator = Authenticator(settings.token, settings.token_file, clock)
        self.store = SessionStore(
            engine, self.worker, settings, self.background_answers, self.authenticator, clock, drafts
        )
        self.plain = PlainDecodingEndpoint(engine, self.worker, self.authenticator, settings, self.metrics)
        self._clock, self._began = clock, clock()
        self._connections: set[Connection] = set()
        self._leaving = False
        self._watch()
        self.website = None if files is None else Website(files, self.metrics, self._misdirected)
        routes: list[BaseRoute] = [
            WebSocketRoute(SESSION_PATH, self._session),
            Route(DECODE_PATH, self._decode, methods=["POST"]),
            Route(STATUS_PATH, self._status),
            Route(METRICS_PATH, self._metrics_text),
            Route(HEALTH_PATH, self._health),
            Route(READY_PATH, self._ready),
            *([] if self.website is None else [self.website]),
        ]
        middleware = [*_cross_origin(settings), Middleware(ErrorMiddleware)]
        self.app = Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan)

    @property
    def decoding(self) -> int:
        """Number of plain decodings under way."""
        return self.plain.running

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Refuse new sessions and requests, answer the received frames, and close all connections.

        Args:
            seconds: time for that; unanswered frames are then given up, or as soon as ``hurry`` is set.
        """
        self._leaving = True
        for connection in self._connections:
            connection.leave()
        deadline = time.monotonic() + seconds
        while (self._connections or self.decoding) and time.monotonic() < deadline and not hurry.is_set():
            await asyncio.sleep(0.02)
        self.worker.give_up()

    # -- requests ----------------------------------------------------------------------------------

    async def _session(self, websocket: WebSocket) -> None:
        bearer = self._bearer(websocket)
        if isinstance(bearer, Response):
            if "websocket.http.response" in websocket.scope.get("extensions", {}):
                await websocket.send_denial_response(bearer)
            else:  # the ASGI server then answers 403
                await websocket.close()
            return
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(SESSION_SUBPROTOCOL if SESSION_SUBPROTOCOL in offered else None)
        connection = Connection(websocket, self, bearer)
        self._connections.add(connection)
        if self._leaving:  # since the upgrade was allowed
            connection.leave()
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)

    async def _decode(self, request: Request) -> Response:
        bearer = self._bearer(request)
        return bearer if isinstance(bearer, Response) else await self.plain.answer(request, bearer)

    async def _status(self, request: Request) -> Response:
        if isinstance(refusal := self._bearer(request), Response):
            return refusal
        return JSONResponse(
            {
                "version": version("moa-edge"),
                "fingerprints": asdict(self.engine.fingerprints),
                "capabilities": asdict(self.engine.capabilities),
                "sessions": len(self.store),
                "forwards": self.engine.forwards,
                "uptime_s": round(self._clock() - self._began, 3),
            }
        )

    async def _metrics_text(self, request: Request) -> Response:
        if isinstance(refusal := self._bearer(request), Response):
            return refusal
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> JSONResponse:
        if self._leaving:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ready"})

    def _bearer(self, connection: HTTPConnection) -> Bearer | JSONResponse:
        """Authenticate a request: return its bearer, or the response that refuses it."""
        headers, settings = connection.headers, self.settings
        if misdirected := self._misdirected(headers):
            return misdirected
        origin = headers.get("origin")
        if not (origin_allowed(origin, settings.origins) or self._own_page(connection)):
            page = str(origin)[:100]
            text = f"web pages of {page} may not use this verifier; moa-serve --allow-origin {page} would let them"
            return self._refused("origin", 403, text)
        try:
            offered = connection.scope.get("subprotocols", [])
            bearer = self.authenticator.authenticate(authorization_of(headers.get("authorization"), offered))
        except SubprotocolError as error:
            return self._refused("token", 400, str(error))
        if bearer is None:
            text = "the bearer token is missing or wrong"
            return self._refused("token", 401, text, {"WWW-Authenticate": "Bearer"})
        if self._leaving:
            text = "this verifier is shutting down; try again later"
            return self._refused("leaving", 503, text, {"Retry-After": str(-(-settings.retry_after_ms // 1000))})
        add_log_fields(bearer=bearer.name)
        return bearer

    def _misdirected(self, headers: Headers) -> JSONResponse | None:
        """Return the refusal of a request for another host; None if the host is allowed."""
        host = headers.get("host")
        if host is None or host_allowed(host, self.settings.loopback, self.settings.hosts):
            return None
        text = f"this verifier listens on this machine alone and answers for localhost, not for {host[:100]}; "
        text += f"moa-serve --allow-host {host[:100]} would let it"
        return self._refused("host", 421, text)

    def _own_page(self, connection: HTTPConnection) -> bool:
        """Whether a request comes from the page that is served here."""
        host = connection.headers.get("host")
        secure = connection.scope["scheme"] in ("https", "wss")
        if self.website is None or host is None or not own_origin(connection.headers["origin"], host, secure):
            return False
        # The same holds for a page whose name is made to resolve to this machine (DNS rebinding). Such a page has no
        # token, for a browser's storage belongs to an origin. If no token is required, the name must be one that no
        # other page can have.
        settings = self.settings
        return (
            not self.authenticator.open
            or settings.loopback
            or names_address(host)
            or host_allowed(host, True, settings.hosts)
        )

    def _refused(self, reason: str, status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
        self.metrics.refused(reason)
        _log.info("refused: %s", text, extra={"data": {"reason": reason}})
        return JSONResponse({"error": text}, status, headers=headers)

    # -- upkeep ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        watch, engine = self.metrics.watch, self.engine
        watch("moa_sessions", "Conversations held.", lambda: len(self.store))
        watch("moa_sessions_connected", "Conversations with a connection.", lambda: self.store.connected)
        watch(
            "moa_sessions_away",
            "Conversations whose answer continues without a connection.",
            lambda: len(self.background_answers),
        )
        watch("moa_jobs", "Frames and requests that wait or are being worked on.", lambda: len(self.worker))
        watch("moa_cache_tokens", "Tokens that caches take up.", lambda: engine.cache_use[0])
        watch("moa_cache_limit_tokens", "Tokens that caches may take up.", lambda: engine.cache_use[1])
        self.metrics.watch_count("moa_forwards", "Forward passes of the target.", lambda: engine.forwards)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self.background_answers.close()
            await self.worker.close()
            if self.drafts is not None:
                self.drafts.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.store.sweep()


def create_app(
    engine: Engine,
    settings: Settings,
    timeline: Timeline = NO_TIMELINE,
    drafts: ServerDrafting | None = None,
    files: Mapping[str, WebFile] | None = None,
) -> Starlette:
    """Make the app of a loaded engine, which must have no other user. ``app.state.verifier`` is its Verifier.

    Args:
        drafts: drafts for clients that grant credit; None for no drafts. Closed with the app.
        files: files of the page by URL path; None for no page. Its sessions need no origin in the settings.
        timeline: records the activity of every session, see :class:`moa_server.connection.Connection`.
    """
    verifier = Verifier(engine, settings, timeline, drafts, files)
    verifier.app.state.verifier = verifier
    return verifier.app


def _cross_origin(settings: Settings) -> list[Any]:
    if not settings.origins:
        return []
    origins = list(settings.origins)
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])]
