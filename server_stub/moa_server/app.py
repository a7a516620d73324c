"""The verifier as an ASGI app: sessions over WebSocket, plain decoding and health over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

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
        if not authorised(websocket, settings.token):
            if "websocket.http.response" in websocket.scope.get("extensions", {}):
                await websocket.send_denial_response(_unauthorised())
            else:  # the ASGI server then answers 403
                await websocket.close()
            return
        await websocket.accept()
        await Connection(websocket, engine, scheduler, store, settings, timeline or NO_TIMELINE).serve()

    async def decode(request: Request) -> Response:
        return await plain.answer(request) if authorised(request, settings.token) else _unauthorised()

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

    app = Starlette(
        routes=[
            WebSocketRoute(SESSION_PATH, session),
            Route(DECODE_PATH, decode, methods=["POST"]),
            Route(HEALTH_PATH, health),
        ],
        lifespan=lifespan,
    )
    app.state.store = store
    return app


def authorised(connection: HTTPConnection, token: str) -> bool:
    """Whether a request carries the bearer token; compared in constant time."""
    given = connection.headers.get("authorization", "")
    return not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _unauthorised() -> JSONResponse:
    return JSONResponse({"error": "the bearer token is missing or wrong"}, 401, headers={"WWW-Authenticate": "Bearer"})


async def _sweep(store: SessionStore) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        await store.sweep()
