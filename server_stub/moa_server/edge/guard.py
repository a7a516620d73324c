"""Limits on what a client sends and takes, around an ASGI app."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from moa_server.edge.connection_limits import ALL_BUSY, END_KEY, TOO_MANY_BODIES, ConnectionSlots, network_of
from moa_server.edge.port_sockets import PortSockets
from moa_server.edge.turnstile import Turnstile
from moa_server.logging import log_unexpected

_log = logging.getLogger(__name__)

_DISCARD_PERIOD_S = 0.05
_DISCARD_BYTES = 256 << 10
_MOST_LINGERING = 128
# Pieces of a body that may be of any size: those of small and slow requests.
_FREE_PIECES = 64

# granian also sends files by their paths, all at once, which would pass by the limits of downloads.
_EXTENSIONS: dict[str, Any] = {"websocket.http.response": {}}

# Made once: a flood of requests is refused more cheaply than it is made.
_BUSY = JSONResponse({"error": ALL_BUSY}, 503, headers={"Retry-After": "5"})
#: Messages that begin an answer.
_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})
_DISCONNECT: Message = {"type": "http.disconnect"}


class EdgeGuard:
    """Bounds the requests and WebSockets of an app that granian serves.

    * If too many connections are busy, or too many requests of a network wait to begin, one is refused with status 503.
    * A body must be whole in time, and in pieces that are not too small, for each costs the event loop a turn.
    * What was written last is not lost: to close a socket with data unread would reset the connection, and the peer
      might never see it. So its socket is held open, and what comes is dropped unparsed, until the peer closes as well.
    """

    def __init__(self, app: ASGIApp, slots: ConnectionSlots, sockets: PortSockets) -> None:
        self._app, self._slots, self._sockets, self._turnstile = app, slots, sockets, Turnstile(slots.limits.requests)
        self.tasks: set[asyncio.Task[None]] = set()  # requests, WebSockets and closing connections
        self.lingering: set[asyncio.Task[None]] = set()  # the last of these

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        peer = scope["client"]
        begun = self._slots.begin(peer, scope["type"] == "websocket")
        try:
            if not (begun and await self._turnstile.enter(network_of(peer[0]))):
                await _refuse(scope["type"] == "websocket", send)
            elif scope["type"] == "websocket":
                await self._websocket(scope, receive, send)
            else:
                await _Request(self, scope, receive, send).run()
        except (ClientDisconnect, WebSocketDisconnect, OSError) as error:
            _log.debug("a client left: %s", error)
        except Exception as error:  # granian would log the traceback
            log_unexpected(_log, scope["path"], error)
        finally:
            self.tasks.discard(task)
            if begun:
                self._slots.finish(peer)

    async def run(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Run the app itself."""
        own = {END_KEY: lambda: self._sockets.end(scope["client"]), "extensions": _EXTENSIONS}
        await self._app({**scope, **own}, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            closing = message["type"] == "websocket.close"
            held = self._sockets.hold(scope["client"]) if closing else None
            try:
                await _deliver(send, message)
            finally:
                if held is not None:
                    with contextlib.suppress(OSError):
                        held.shutdown(socket.SHUT_WR)
                    self.linger(held)

        async def counted() -> Message:
            message = await receive()
            self._slots.take(scope["client"], len(message.get("bytes") or message.get("text") or ""))
            return message

        await self.run(scope, counted, watched)

    def hold(self, scope: Scope) -> None:
        """Keep a connection that granian is about to close open for a while."""
        if (held := self._sockets.hold(scope["client"])) is not None:
            self.linger(held)

    def linger(self, held: socket.socket) -> None:
        """Close a connection once its peer has."""
        if len(self.lingering) >= _MOST_LINGERING:
            held.close()
            return
        task = asyncio.create_task(self._discard(held))
        for tasks in (self.tasks, self.lingering):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _discard(self, held: socket.socket) -> None:
        """Read and drop, slowly, until the peer closes or a limit is reached."""
        limits, dropped = self._slots.limits, 0
        deadline = self._slots.clock() + limits.close_seconds
        with held, contextlib.suppress(OSError):
            while dropped < limits.discard_bytes and self._slots.clock() < deadline:
                await asyncio.sleep(_DISCARD_PERIOD_S)
                with contextlib.suppress(BlockingIOError):
                    data = held.recv(_DISCARD_BYTES)
                    if not data:
                        return
                    dropped += len(data)


class _Request:
    """One HTTP request."""

    def __init__(self, guard: EdgeGuard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self._limits = guard._slots.limits
        names = {name for name, _ in scope["headers"]}
        self._whole = not names & {b"content-length", b"transfer-encoding"}
        loop = asyncio.get_running_loop()
        self._deadline, self._given_up = loop.time() + self._limits.body_seconds, loop.create_future()
        self._pieces = self._bytes = 0
        self._started = self._refused = False

    async def run(self) -> None:
        """Run the app on it."""
        if not self._whole:
            self._guard._slots.body_begins(self._scope["client"], lambda: self._given_up.set_result(None))
        await self._guard.run(self._scope, self._next, self._answer)

    async def _next(self) -> Message:
        if self._refused:
            return _DISCONNECT
        if self._whole:
            return await self._receive()
        left = self._deadline - asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(_awaited(self._receive))
        try:
            await asyncio.wait({receiving, self._given_up}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived = receiving.done() or not receiving.cancel()
        if not arrived and self._given_up.done():
            return await self._refuse(503, TOO_MANY_BODIES)
        if not arrived:
            return await self._refuse(408, f"the body did not arrive within {self._limits.body_seconds:g} seconds")
        message = receiving.result()
        if message["type"] == "http.disconnect":  # or the body is malformed, and the client is there
            return await self._refuse(400, "the request's body is malformed")
        self._whole = not message.get("more_body", False)
        if self._whole:
            self._guard._slots.body_ended(self._scope["client"])
        self._pieces, self._bytes = self._pieces + 1, self._bytes + len(message.get("body", b""))
        if self._pieces > _FREE_PIECES + self._bytes // self._limits.piece_bytes:
            text = f"the body arrives in pieces of fewer than {self._limits.piece_bytes} bytes"
            return await self._refuse(400, text)
        return message

    async def _refuse(self, status: int, text: str) -> Message:
        """Answer if the app has not begun to; the app is told that the client left."""
        if not self._started:
            headers = {"Retry-After": "5"} if status == 503 else None
            await JSONResponse({"error": text}, status, headers=headers)(self._scope, self._receive, self._answer)
        self._refused = True
        return _DISCONNECT

    async def _answer(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            self._started = True
        elif not (self._whole or message.get("more_body", False)):
            self._guard.hold(self._scope)
        await _deliver(self._send, message)


async def _awaited(receive: Receive) -> Message:
    return await receive()


async def _deliver(send: Send, message: Message) -> None:
    """Send a message; an answer closes its connection. Raises OSError if the peer is gone.

    One request a connection: if a proxy in front takes another byte for the end of a request, as of one with line feeds
    alone, nothing that a client smuggled past it is answered. Without granian's keep-alive the same would be in the
    answer that accepts a WebSocket, and OkHttp, of Android apps and React Native, refuses `Connection: upgrade, close`.
    """
    if message["type"] in _STARTS:
        message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
    try:
        await send(message)
    except Exception as error:  # granian's
        raise OSError(str(error)) from error


async def _refuse(websocket: bool, send: Send) -> None:
    prefix = "websocket.http.response" if websocket else "http.response"
    await _deliver(send, {"type": f"{prefix}.start", "status": 503, "headers": _BUSY.raw_headers})
    await _deliver(send, {"type": f"{prefix}.body", "body": _BUSY.body})
