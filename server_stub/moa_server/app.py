"""The verifier as an ASGI app: sessions over WebSocket, plain decoding and health over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from moa_runtime.access import bearer_matches, origin_allowed
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.connection import Connection
from moa_server.decoding import PlainDecoding
from moa_server.engine import Engine
from moa_server.scheduler import Scheduler
from moa_server.sessions import SessionStore
from moa_server.settings import Settings

SESSION_PATH, DECODE_PATH, HEALTH_PATH = "/v1/session", "/v1/decode", "/healthz"

_SWEEP_SECONDS = 5.0


def create_app(engine: Engine, settings: Settings, timeline: Timeline | None = None) -> Starlette:
    """The app for a loaded engine, which only the app's worker thread may use from now on.

    ``app.state.store`` is the :class:`SessionStore`.

    Args:
        timeline: gets what every session does and when, see :class:`moa_server.connection.Connection`.
    """
    scheduler = Scheduler()
    store = SessionStore(engine, scheduler, settings)
    plain = PlainDecoding(engine, scheduler, settings)
    began = time.monotonic()

    async def session(websocket: WebSocket) -> None:
        if refusal := refusal_of(websocket, settings):
            if "websocket.http.response" in websocket.scope.get("extensions", {}):
                await websocket.send_denial_response(refusal)
            else:  # the ASGI server then answers 403
                await websocket.close()
            return
        await websocket.accept()
        await Connection(websocket, engine, scheduler, store, settings, timeline or NO_TIMELINE).serve()

    async def decode(request: Request) -> Response:
        return refusal_of(request, settings) or await plain.answer(request)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "status": "ok",
                "version": version("moa-edge"),
                "fingerprints": asdict(engine.fingerprints),
                "sessions": len(store),
                "forwards": engine.forwards,
                "uptime_s": round(time.monotonic() - began, 3),
            }
        )

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(_sweep(store))
        try:
            yield
        finally:
            sweeping.cancel()
            scheduler.close()

    middleware = []
    if settings.origins:
        allowed = {"allow_origins": list(settings.origins), "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **allowed))
    app = Starlette(
        routes=[
            WebSocketRoute(SESSION_PATH, session),
            Route(DECODE_PATH, decode, methods=["POST"]),
            Route(HEALTH_PATH, health),
        ],
        middleware=middleware,
        lifespan=lifespan,
    )
    app.state.store = store
    return app


def refusal_of(connection: HTTPConnection, settings: Settings) -> JSONResponse | None:
    """Why a request is refused, if it is: it comes from a web page that may not ask, or lacks the bearer token."""
    origin = connection.headers.get("origin")
    if not origin_allowed(origin, settings.origins):
        text = f"web pages of {origin} may not use this verifier; moa-serve --allow-origin {origin} would let them"
        return JSONResponse({"error": text}, 403)
    if not bearer_matches(connection.headers.get("authorization", ""), settings.token):
        challenge = {"WWW-Authenticate": "Bearer"}
        return JSONResponse({"error": "the bearer token is missing or wrong"}, 401, headers=challenge)
    return None


async def _sweep(store: SessionStore) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        await store.sweep()
