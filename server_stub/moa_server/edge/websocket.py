"""uvicorn's WebSocket protocol with bounds and deadlines."""

from __future__ import annotations

import asyncio
from asyncio.transports import BaseTransport
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame

from moa_server.edge.connection_limits import FULL_KEY, ConnectionSlot
from moa_server.edge.rate_limits import TokenBucket


class SlotProtocol(asyncio.Protocol):
    """Mixin that reports events of a uvicorn protocol to its slot; goes first among the bases."""

    _slot: ConnectionSlot

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._slot.leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slot.write_paused(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._slot.write_paused(False)


# Bytes parsed at once: some hundred of the smallest frames, a few milliseconds.
_SLICE = 4 << 10

_POLICY, _INVALID_TEXT, _TOO_BIG, _NO_PONG, _RESTART = 1008, 1007, 1009, 1011, 1012  # close codes (RFC 6455)

_BAD_UPGRADE = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class EdgeWebSocket(SlotProtocol, WebSocketsSansIOProtocol):
    """A WebSocket on one connection.

    Adds to its base: frames are parsed only as fast as the app takes them; pings, pongs and the fragments of a message
    are limited; a peer that does not read is disconnected; a close frame is not lost: data after it is dropped until
    the peer closes too, or ``close_seconds`` have passed.

    The slot is busy from the first complete message, which must be short, until the end. If too many are busy, each
    message to the app has :data:`FULL_KEY`; the app then tells the client and closes.
    """

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], slot: ConnectionSlot
    ):
        super().__init__(config, server_state, app_state)
        self._slot = slot
        limits = slot.limits
        self._control = TokenBucket(limits.control_frames_per_second, limits.control_frames_burst, self.loop.time)
        self._unparsed = bytearray()
        self._before_first: int | None = 0  # bytes parsed before the first message is complete
        self._discarding = False
        self._lost = asyncio.Event()
        self.app = self._guarded

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._slot.set_deadline(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        if self._discarding or self.transport.is_closing():
            return
        if not self.handshake_initiated:  # the upgrade request, whole
            super().data_received(data)
            if not self.handshake_initiated:  # websockets parsed no request in it
                self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_UPGRADE)
                self.transport.close()
            return
        self._unparsed += data
        self._parse()
        if self._unparsed:  # most often paused by the base when it queued a message; not before the handshake
            self.read_paused = True
            self.transport.pause_reading()

    def _parse(self) -> None:
        """Parse received data until a message waits for the app."""
        while self._unparsed and self.handshake_complete and (self.close_sent or self.queue.empty()):
            if self.transport.is_closing():  # after a refusal
                self._unparsed.clear()
                return
            part = bytes(self._unparsed[:_SLICE])
            del self._unparsed[:_SLICE]
            super().data_received(part)
            if self._before_first is not None:
                self._before_first += len(part)
                if self._before_first > self._slot.limits.first_message_bytes:
                    self._fail(_TOO_BIG, f"no whole message in the first {self._slot.limits.first_message_bytes} bytes")
            if self._discarding:
                self._unparsed.clear()

    async def receive(self) -> Any:
        message: Any = await self.queue.get()
        if message["type"] == "websocket.receive" and not (self.close_sent or self._slot.busy or self._slot.begin()):
            message = {**message, FULL_KEY: True}
        self._go_on_reading()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        self._slot.check_write_buffer(len(message.get("bytes") or message.get("text") or ""))
        if self.close_sent:
            self._linger()
        elif self._unparsed:  # since before the handshake
            self._go_on_reading()

    def _go_on_reading(self) -> None:
        if self.queue.empty() or self.close_sent:
            self._parse()
        if self.read_paused and not self._unparsed and (self.queue.empty() or self.close_sent):
            self.read_paused = False
            self.transport.resume_reading()

    def handle_ping(self) -> None:
        if self._control_frame():
            super().handle_ping()
            self._slot.check_write_buffer()

    def handle_pong(self, event: Frame) -> None:
        if self._control_frame():
            super().handle_pong(event)

    def _control_frame(self) -> bool:
        """Whether one more may come."""
        if self._discarding or self.transport.is_closing():
            return False
        if self._control.wait_s(1) > 0:
            self._fail(_POLICY, "too many pings")
        return not self._discarding

    def handle_cont(self, event: Frame) -> None:
        # Empty fragments never reach the limit of bytes.
        if len(self.frames) >= self._slot.limits.fragments:
            self._fail(_TOO_BIG, f"a message of more than {self._slot.limits.fragments} fragments")
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        self._before_first = None
        if self.close_sent:  # over TLS: the app wants no more, and the sooner the close frame comes the better
            self.frames = []
            self._control_frame()
            return
        if self.curr_msg_data_type == "text":
            try:
                self.frames = [b"".join(self.frames)]
                self.frames[0].decode()
            except UnicodeDecodeError:  # for which the base logs a traceback
                self._fail(_INVALID_TEXT, "a text message that is no UTF-8")
                return
        super().send_receive_event_to_app()

    def handle_close(self, event: Frame) -> None:
        if self.close_sent:  # over TLS: nothing comes after this frame, so that to close resets nothing
            self.transport.close()
        else:
            super().handle_close(event)

    def handle_parser_exception(self) -> None:
        """End after a violation of the protocol, or a message that is too large."""
        self._end()

    def keepalive_timeout(self) -> None:
        self.pong_timer = None
        if not self.transport.is_closing():
            self._fail(_NO_PONG, "keepalive ping timeout")

    def shutdown(self) -> None:
        """Close because the server ends. A connection that is being closed already is left to its deadline."""
        if not self.handshake_complete:
            super().shutdown()
        elif not (self.close_sent or self.transport.is_closing()):
            self._fail(_RESTART, "")

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.config.loaded_app(scope, receive, send)
        except WebSocketDisconnect:  # the app let it pass; for the base it would be a fault of the app
            self.logger.debug("a client left")
        if self.initial_response is not None or self.transport.is_closing():
            # The app refused the upgrade, or its client left first: the base would log that the app forgot to answer.
            self.handshake_complete = True
        if self.close_sent:  # the base closes the transport when the app has ended
            await self._lost.wait()

    def _fail(self, code: int, reason: str) -> None:
        if not self._discarding:
            self.conn.fail(code, reason)
            self._end()

    def _end(self) -> None:
        """Send the close frame that websockets has written, tell the app, and wait a little for the client to close."""
        if self._discarding:
            return
        self._discarding = True
        if not self.close_sent:
            close = self.conn.close_sent
            code, reason = (close.code, close.reason) if close else (1006, "")
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_sent = self.disconnected = True
        self.frames = []
        self.transport.write(b"".join(self.conn.data_to_send()))
        self._linger()

    def _linger(self) -> None:
        """The close frame is written: wait until the client has closed as well, or has had its time for that.

        To close at once, with data unread or on its way, would reset the connection, and the client might never see
        what was written last. Later data from the client is dropped unparsed. Only over TLS, where only the client's
        close frame shows that it has ours, are frames still parsed, as many as pings may come.
        """
        self._discarding = self._slot.linger() or self._discarding
        self.stop_keepalive()
        if self.close_timer is not None:  # the base's deadline, which does not wait until all is sent
            self.close_timer.cancel()
            self.close_timer = None
        if self._discarding:
            self._unparsed.clear()
        self._go_on_reading()
