"""Reads frames ahead of their processing, so that a client that leaves is noticed at once; limits the read-ahead."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable, Iterator

from starlette.websockets import WebSocket

from moa_runtime.session.handshake import fault
from moa_runtime.session.server import parse_client_message
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.edge.connection_limits import ALL_BUSY, FULL_KEY

#: Largest first frame; a Hello has less than 300 bytes.
MAX_HELLO_BYTES = 4 << 10


class CloseReason(enum.Enum):
    """Reason why a connection accepts no more frames."""

    LEFT = "the client left"
    REPLACED = "another connection continued this conversation"
    LEAVING = "this verifier is shutting down"
    FLOODED = "more frames than a client can await verdicts for"
    SILENT = "nothing was received"
    FULL = ALL_BUSY
    WITHDRAWN = "the bearer token was withdrawn"


class FrameReader:
    """Parsed frames of one WebSocket, in order.

    Args:
        on_message: called with each message on arrival; returns True if the message needs no further handling.
        on_end: called when the connection ends for any reason but LEAVING: no answer can be delivered.
        most_waiting: frames that may be queued; one more ends the connection.
        max_frame_bytes: a larger frame is answered with a fault, as is a first one of more than
            :data:`MAX_HELLO_BYTES`. Twice as many bytes may wait.

    Attributes:
        taken_at: arrival time (``time.monotonic``) of the last frame that :meth:`next` returned.
    """

    def __init__(
        self,
        websocket: WebSocket,
        *,
        on_message: Callable[[wire.ClientMessage], bool],
        on_end: Callable[[], None],
        most_waiting: int,
        max_frame_bytes: int,
    ) -> None:
        self._websocket, self._on_message, self._on_end = websocket, on_message, on_end
        self._most_waiting, self._max_frame_bytes = most_waiting, max_frame_bytes
        self._most_bytes = min(MAX_HELLO_BYTES, max_frame_bytes)  # of the next frame
        self._frames: deque[tuple[wire.ClientMessage | wire.ServerMessage, int, float]] = deque()
        self.taken_at = 0.0
        self._changed = asyncio.Event()
        self._end: CloseReason | None = None
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def waiting(self) -> Iterator[wire.ClientMessage]:
        """Messages that :meth:`next` has not returned yet."""
        return (message for message, _, _ in self._frames if isinstance(message, wire.ClientMessage))

    @property
    def ready(self) -> bool:
        """Whether :meth:`next` returns without waiting."""
        return bool(self._frames or self._failure or self._end)

    @property
    def over(self) -> bool:
        """Whether the client is gone or replaced, so that no answer can be delivered."""
        return self._over.is_set()

    async def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a frame or the end; return whether there is one."""
        while not self.ready:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return False
        return True

    async def pause(self, seconds: float) -> None:
        """Sleep, but not longer than until the connection is over."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    async def next(self, seconds: float) -> tuple[wire.ClientMessage | wire.ServerMessage, int] | CloseReason:
        """Return the next message, or the fault for an invalid frame, with its size in bytes; or the reason of the end.

        Frames that arrived before the shutdown began are still returned.

        Args:
            seconds: silence after which the connection ends.
        """
        if not await self.wait(seconds):
            return CloseReason.SILENT
        if self._failure is not None:
            raise self._failure
        if self._frames and not self.over:
            message, size, self.taken_at = self._frames.popleft()
            return message, size
        assert self._end is not None
        return self._end

    def end(self, why: CloseReason) -> None:
        """Accept no more frames. The first reason stays, except that LEAVING may be replaced."""
        if self._end in (None, CloseReason.LEAVING):
            self._end = why
            self._changed.set()
            if why is not CloseReason.LEAVING:
                self._over.set()
                self._on_end()

    async def close(self) -> None:
        """Stop reading."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            await self._read_frames()
        except Exception as error:  # raised by next()
            self._failure = error
            self._changed.set()
            self._on_end()

    async def _read_frames(self) -> None:
        while self._end is None:
            received = await self._websocket.receive()
            if received["type"] == "websocket.disconnect":
                self.end(CloseReason.LEFT)
                return
            if FULL_KEY in received:
                self.end(CloseReason.FULL)
                return
            data = received.get("bytes")
            waiting = sum(size for _, size, _ in self._frames)
            if len(self._frames) >= self._most_waiting or waiting > 2 * self._max_frame_bytes:
                self.end(CloseReason.FLOODED)
                return
            message = self._parse(data)
            self._most_bytes = self._max_frame_bytes
            if isinstance(message, wire.ClientMessage) and self._on_message(message):
                continue
            self._frames.append((message, len(data or b""), time.monotonic()))
            self._changed.set()

    def _parse(self, frame: bytes | None) -> wire.ClientMessage | wire.ServerMessage:
        if frame is None:
            return fault(wire.FAULT_CODE_PROTOCOL, "a text frame; this protocol is binary")
        if len(frame) > self._most_bytes:
            which = "frame" if self._most_bytes == self._max_frame_bytes else "first frame"
            text = f"a {which} of {len(frame)} bytes; this verifier takes {self._most_bytes}"
            return fault(wire.FAULT_CODE_TOO_LARGE, text)
        return parse_client_message(frame)
