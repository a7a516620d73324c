"""A small app behind the verifier's edge on a loopback port, and raw clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.sync.client import connect

from moa_server.edge.connection_limits import ConnectionSlots, EdgeLimits
from moa_server.edge.server import EdgeServer
from support.server.running import TIMEOUT_S, in_thread, trusting

MAX_MESSAGE = 64 << 10


@dataclass
class Edge:
    """A running server.

    Attributes:
        take: while it is clear, the app's WebSocket takes no message.
        hold: while it is clear, the app does not answer ``/hold``.
        ended: one item for each WebSocket that the app saw end.
        records: of all loggers, from WARNING on.
    """

    port: int = 0
    server: Any = None
    take: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event = field(default_factory=threading.Event)
    ended: list[int | None] = field(default_factory=list)
    records: list[logging.LogRecord] = field(default_factory=list)

    @property
    def slots(self) -> ConnectionSlots:
        return self.server.slots

    def open(self, sent: bytes = b"", **options: Any) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S, **options)
        connected.sendall(sent)
        return connected

    def ask(self, request: bytes = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") -> bytes:
        with self.open(request) as connected:
            return read_all(connected)

    def websocket(self, **options: Any) -> Any:
        return connect(f"ws://127.0.0.1:{self.port}/ws", compression=None, max_size=None, close_timeout=5, **options)

    def complaints(self) -> list[str]:
        """Log lines that tell of a fault in the server."""
        return [f"{each.getMessage()} {each.exc_info}" for each in self.records]


@contextlib.contextmanager
def edge(limits: EdgeLimits, tls: tuple[Path, Path] | None = None) -> Iterator[Edge]:
    """Serve until the block ends."""
    running = Edge()
    running.take.set()
    running.hold.set()
    started = threading.Event()

    async def until(event: threading.Event) -> None:
        while not event.is_set():
            await asyncio.sleep(0.01)

    async def home(request: Request) -> JSONResponse:
        return JSONResponse({"ok": True})

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def refusing(request: Request) -> PlainTextResponse:
        return PlainTextResponse("no", 401)

    async def hold(request: Request) -> PlainTextResponse:
        await until(running.hold)
        return PlainTextResponse("held")

    async def endless(request: Request) -> StreamingResponse:
        async def parts():
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)  # a send to a client that has left returns at once

        return StreamingResponse(parts())

    async def websocket(ws: WebSocket) -> None:
        if "refuse" in ws.query_params:
            await ws.send_denial_response(JSONResponse({"error": "no"}, 401))
            return
        await ws.accept()
        code = None
        try:
            while code is None:
                await until(running.take)
                message = await ws.receive()
                data = message.get("bytes") or (message.get("text") or "").encode()
                if message["type"] == "websocket.disconnect":
                    code = message["code"]
                elif data == b"close":
                    await ws.close(4000)
                elif data.startswith(b"flood"):
                    await ws.send_bytes(b"y" * int(data[5:]))
                else:
                    await ws.send_bytes(data)
        except WebSocketDisconnect as left:
            code = left.code
            raise
        finally:
            running.ended.append(code)

    routes = [Route("/", home), Route("/echo", echo, methods=["POST"]), Route("/hold", hold)]
    routes += [Route("/refusing", refusing, methods=["POST"]), Route("/endless", endless)]
    app = Starlette(routes=[*routes, WebSocketRoute("/ws", websocket)])

    class Server(EdgeServer):
        async def startup(self) -> None:
            await super().startup()
            started.set()

    running.server = Server(app, limits, tls)
    handler = logging.Handler(logging.WARNING)
    handler.emit = running.records.append  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with in_thread(running.server, started) as (running.port, thread):
            try:
                yield running
            finally:
                running.take.set()
                running.hold.set()
    finally:
        logging.getLogger().removeHandler(handler)
    assert not thread.is_alive()


def eventually(condition: Callable[[], Any], seconds: float = TIMEOUT_S) -> Any:
    """What ``condition`` returns once that is true."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.01)
    return value


def read_all(connected: socket.socket) -> bytes:
    """What comes until the end of the stream; a reset is one."""
    received = bytearray()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connected.recv(65536):
            received += part
    return bytes(received)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def secured(connected: socket.socket) -> ssl.SSLSocket:
    """Over TLS, whoever the server may be."""
    return trusting().wrap_socket(connected)


def is_closed(connected: socket.socket) -> bool:
    """Whether the server has closed, seen without waiting."""
    connected.setblocking(False)
    try:
        return connected.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connected.settimeout(TIMEOUT_S)
