"""ASGI middleware that turns unexpected exceptions into one log line and one sentence for the client."""

from __future__ import annotations

import contextlib
import logging

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from moa_server.logging import log_fields, log_unexpected

_INTERNAL_ERROR = 1011  # WebSocket close code (RFC 6455)

_log = logging.getLogger(__name__)


class ErrorMiddleware:
    """Answers an exception of the app with status 500 or close code 1011, and stops it.

    Exceptions about disconnected clients are left to the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = ""

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = message["type"]
            await send(message)

        with log_fields():
            try:
                await self._app(scope, receive, watched)
            except (ClientDisconnect, WebSocketDisconnect):
                raise
            except Exception as error:
                log_unexpected(_log, scope.get("path", scope["type"]), error)
                with contextlib.suppress(Exception):  # the same failure may recur here
                    await _answer(scope, receive, send, begun)


async def _answer(scope: Scope, receive: Receive, send: Send, begun: str) -> None:
    """Tell the client if that is still possible; the server aborts an answer that has begun.

    Args:
        begun: type of the last message of the app.
    """
    refusal = JSONResponse({"error": "the verifier failed on this request"}, 500)
    if scope["type"] == "http" and not begun:
        await refusal(scope, receive, send)
    elif scope["type"] == "websocket" and not begun:
        await WebSocket(scope, receive, send).send_denial_response(refusal)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _INTERNAL_ERROR})
