"""A link in memory: what moa_runtime's transport connects to on one end, Starlette's WebSocket on the other.

Within a connection frames keep their order and none is lost, as over TCP; a connection that dies takes along what was
under way, and the two ends notice it each in their own time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError

_CLOSED = object()


class _Pipe:
    """One direction. Deliveries keep their order whatever the delay."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._under_way: deque[Any] = deque()
        self._last = 0.0
        self._dead = False
        self.last_frame: bytes | None = None

    def put(self, item: Any, delay: float) -> None:
        if isinstance(item, bytes):
            self.last_frame = item
        self._last = max(self._loop.time() + delay, self._last)
        self._under_way.append(item)
        self._loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        item = self._under_way.popleft()  # calls for the same moment come in any order
        if not self._dead:
            self._queue.put_nowait(item)

    def die(self, noticed_after: float) -> None:
        """What is under way is lost; the receiver learns that later."""
        if not self._dead:
            self._dead = True
            self._loop.call_later(noticed_after, self._queue.put_nowait, _CLOSED)

    def take_all(self) -> list[Any]:
        """What has arrived."""
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    async def get(self) -> Any:
        """The next item, at the end ``_CLOSED``, again and again."""
        item = await self._queue.get()
        if item is _CLOSED:
            self._queue.put_nowait(_CLOSED)
        return item


class ServerEnd:
    """What a server's app has of a WebSocket: ``receive``, ``send_bytes``, ``close``."""

    def __init__(self, link: MemoryLink, up: _Pipe, down: _Pipe) -> None:
        self._link, self._up, self._down = link, up, down
        self._gone = self._closed = False

    async def receive(self) -> dict[str, Any]:
        if self._gone:
            raise RuntimeError("receive after a disconnect")
        item = await self._up.get()
        if item is _CLOSED:
            self._gone = True
            return {"type": "websocket.disconnect", "code": 1006}
        return {"type": "websocket.receive", "bytes": item, "text": None}

    async def send_bytes(self, data: bytes) -> None:
        if self._closed:
            raise RuntimeError("send after close")
        await asyncio.sleep(0)
        if self._gone:
            raise WebSocketDisconnect(1006)
        self._down.put(data, self._link.delay_down())

    async def close(self, code: int = 1000) -> None:
        self._closed = True
        self._link.close_codes.append(code)
        self._down.put(_CLOSED, self._link.delay_down())


class ClientEnd:
    """What the transport has of a connection of the websockets library."""

    def __init__(self, link: MemoryLink, up: _Pipe, down: _Pipe) -> None:
        self._link, self.up, self.down = link, up, down
        self._gone = False

    async def __aenter__(self) -> ClientEnd:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.up.put(_CLOSED, self._link.delay_up())
        self._gone = True

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self._gone:
            raise ConnectionClosedError(None, None)
        self.up.put(data, self._link.delay_up())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (item := await self.down.get()) is not _CLOSED:
            yield item
        self._gone = True


class MemoryLink:
    """Makes connections between a transport and a server.

    Args:
        serve: serves one accepted connection.
        delay_up, delay_down: seconds that the next frame is under way.

    Attributes:
        open: whether new connections are answered; a list of seconds that each takes before it is refused else.
        headers: of each request for a connection.
        close_codes: of connections that the server closed.
    """

    def __init__(
        self,
        serve: Callable[[ServerEnd], Awaitable[None]],
        delay_up: Callable[[], float] = lambda: 0.0,
        delay_down: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._serve, self.delay_up, self.delay_down = serve, delay_up, delay_down
        self.open = True
        self.current: ClientEnd | None = None
        self.headers: list[dict[str, str]] = []
        self.close_codes: list[int] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def connect(
        self, address: str, *, additional_headers: Mapping[str, str] | None = None, **options: Any
    ) -> ClientEnd:
        """What stands in for ``websockets.asyncio.client.connect``."""
        self.headers.append(dict(additional_headers or {}))
        await asyncio.sleep(self.delay_up() + self.delay_down())
        if not self.open:
            raise OSError("nobody listens")
        up, down = _Pipe(), _Pipe()
        self.current = ClientEnd(self, up, down)
        task = asyncio.create_task(self._accept(ServerEnd(self, up, down)))  # type: ignore[arg-type]
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return self.current

    def cut(self, client_after: float = 0.0, server_after: float = 0.0) -> None:
        """Lose the connection and all frames in flight; each end notices after its delay in seconds."""
        if self.current is not None:
            self.current.up.die(server_after)
            self.current.down.die(client_after)

    def kill_server_side(self) -> None:
        """The server's process dies: its connections end at once."""
        self.cut()
        for task in self._serving:
            task.cancel()

    async def closed(self) -> None:
        """Wait until the server has ended all connections."""
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, end: ServerEnd) -> None:
        await self._serve(end)
