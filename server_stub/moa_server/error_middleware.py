"""The last catch around the app: what nobody foresaw is one line in the log, and one sentence for the client."""

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
    """ASGI middleware: an exception of the app is answered with 500 or the close code 1011, and goes no further.

    What a client's leaving raises is left to the server around the app.
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
                with contextlib.suppress(Exception):  # whatever hindered the app may hinder this
                    await _answer(scope, receive, send, begun)


async def _answer(scope: Scope, receive: Receive, send: Send, begun: str) -> None:
    """Tell the client, if that is still possible; an answer that has begun is broken off by the server.

    Args:
        begun: type of the last message that the app sent.
    """
    refusal = JSONResponse({"error": "the verifier failed on this request"}, 500)
    if scope["type"] == "http" and not begun:
        await refusal(scope, receive, send)
    elif scope["type"] == "websocket" and not begun:
        await WebSocket(scope, receive, send).send_denial_response(refusal)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _INTERNAL_ERROR})
