"""Signs of life for clients that can send no WebSocket ping, such as browsers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.websockets import WebSocketDisconnect

from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: Seconds from a Ping that is answered at once to the next such one.
_INTERVAL_S = 0.5


class Pongs:
    """Answers the Pings of one connection ahead of the frames before them: who asks for a sign of life else gives up a
    link that is only busy. Like a WebSocket ping it is no sign that the client works.

    Args:
        send: a message to the client.

    Attributes:
        lost: whether the client turned out to be gone. Its WebSocket says so once, and takes what else is sent for a
            mistake.
    """

    def __init__(self, send: Callable[[wire.ServerMessage], Awaitable[None]]) -> None:
        self._send = send
        self.lost = False
        self._sending: asyncio.Task[None] | None = None
        self._next = 0.0

    def take(self, message: wire.ClientMessage) -> bool:
        """Answer it, if it is a Ping and no other was answered just before; says whether that was done."""
        busy = self._sending is not None and not self._sending.done()
        if message.WhichOneof("event") != "ping" or busy or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _INTERVAL_S
        stamp = message.ping.stamp
        echo = wire.Echo(stamp=stamp) if stamp else None
        self._sending = asyncio.create_task(self._answer(wire.ServerMessage(pong=wire.Pong(echo=echo))))
        return True

    async def close(self) -> None:
        """Send no more."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _answer(self, pong: wire.ServerMessage) -> None:
        try:
            await self._send(pong)
        except WebSocketDisconnect:
            self.lost = True
        except RuntimeError:
            pass  # closed meanwhile
