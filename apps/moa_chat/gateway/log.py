"""One line for each request."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NOTE = "moa_chat.note"


class RequestLog:
    """Says what was asked, the status, how long it took, and what was noted."""

    def __init__(self, app: ASGIApp, *, say: Callable[[str], None]) -> None:
        self._app, self._say = app, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        began = time.monotonic()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            seconds = time.monotonic() - began
            line = f"{scope['method']} {scope['path']} {status or 'broken off'} in {seconds:.2f} s"
            # Paths come from outside: nothing in them may talk to the terminal.
            self._say(ascii(f"{line}: {scope[_NOTE]}" if _NOTE in scope else line)[1:-1])


def note(scope: Scope, text: str) -> None:
    """Add to the request's line."""
    scope[_NOTE] = text
