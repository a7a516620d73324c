"""uvicorn's HTTP protocol with bounds and deadlines."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import sys
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState
from websockets.exceptions import InvalidHeaderFormat
from websockets.headers import parse_subprotocol

from moa_runtime.http_framing import FramingError, StrictConnection
from moa_server.edge.connection_limits import ALL_BUSY, END_KEY, ConnectionSlot
from moa_server.edge.websocket import EdgeWebSocket, SlotProtocol

# h11 looks at its limit only when a header is still incomplete, so it is given no more than this of one at once.
_HEADER_SLICE = 1 << 10

_RETRY_AFTER = (b"retry-after", b"5")
_CLOSE = (b"connection", b"close")


class _ClientFaults(logging.LoggerAdapter):  # type: ignore[type-arg]  # needs Python 3.11
    """uvicorn's logger, with client errors logged at debug instead of warning."""

    warning = logging.LoggerAdapter.debug

    @property
    def level(self) -> int:
        return int(self.logger.level)


class EdgeHttp(SlotProtocol, H11Protocol):
    """HTTP/1.1 on one connection.

    Adds to its base: deadlines for the header and for the body, a limit on the header's size, the end of connections
    whose peer does not read, and one JSON sentence instead of a log line as the answer to invalid requests. An answer
    before the end of the body is the last one of its connection; the rest of the body is then read and dropped, within
    limits, so that the answer is not lost.
    """

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], slot: ConnectionSlot
    ):
        super().__init__(config, server_state, app_state)
        self._slot = slot
        self.conn = StrictConnection(h11.SERVER, max_incomplete_event_size=slot.limits.header_bytes)
        self.logger = _ClientFaults(self.logger, {})  # type: ignore[assignment]
        self.ws_protocol_class = functools.partial(EdgeWebSocket, slot=slot)  # type: ignore[assignment]
        self.app = self._unless_refused
        self._received = self._discarding = False
        self._discarded = 0  # bytes
        self._websocket: asyncio.BaseProtocol | None = None
        self._stage: tuple[object, object] = (h11.IDLE, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._slot.transport = transport
        self._slot.on_deadline = self._too_slow

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._received = True
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > self._slot.limits.discard_bytes:
                self._slot.end()
            return
        start = 0
        while start < len(data) and not (self._discarding or self.transport.is_closing()):
            end = start + _HEADER_SLICE if self.conn.their_state is h11.IDLE else len(data)
            if self._websocket is None:
                super().data_received(data[start:end])
            else:
                self._websocket.data_received(data[start:])  # type: ignore[attr-defined]
                return
            start = end

    def handle_events(self) -> None:
        super().handle_events()
        self._see_stage()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._see_stage()

    def shutdown(self) -> None:
        """End with the server; a client whose request was answered early gets time to read the answer."""
        if self._discarding:
            self._slot.set_deadline(self._slot.limits.close_seconds)
        else:
            super().shutdown()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._slot.wait()  # a request before it may have been busy
        if self._slot.slots.full():
            self._refuse(503, ALL_BUSY)
            return
        if not all(_well_formed(value) for name, value in event.headers if name == b"sec-websocket-protocol"):
            # The base would repeat the header in its answer, and it may hold a token.
            self._refuse(400, "the header Sec-WebSocket-Protocol must be a list of names with commas between them")
            return
        super().handle_websocket_upgrade(event)
        self._websocket = self.transport.get_protocol()
        if early := self.conn.trailing_data[0]:
            self._websocket.data_received(early)  # type: ignore[attr-defined]

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 could not parse."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if isinstance(error, FramingError):
            msg = str(error)
        elif status == 431:
            msg = f"the request header has more than {self._slot.limits.header_bytes} bytes"
        self._refuse(status, msg)

    async def _unless_refused(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, unless its request was already refused."""
        if self._discarding:
            return
        cycle = self.cycle

        async def last_if_early(message: Message) -> None:
            if not cycle.more_body:
                await send(message)
            elif message["type"] == "http.response.start":
                await send({**message, "headers": [*message.get("headers", []), _CLOSE]})
            else:
                await send({**message, "more_body": True})
                if not message.get("more_body", False):
                    self._end_early(cycle)

        try:
            await self.config.loaded_app({**scope, END_KEY: self._slot.end}, receive, last_if_early)
        except ClientDisconnect:
            self.logger.debug("a client left before its request was answered")

    def _end_early(self, cycle: RequestResponseCycle) -> None:
        """End an answer that precedes the end of the body: the base would wait for it, or close and lose the answer."""
        if cycle.disconnected:
            return
        cycle.response_complete = True
        cycle.message_event.set()
        self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        self._discard_rest()  # until the body's deadline

    def _see_stage(self) -> None:
        """Note whether a request is being answered, and set the deadline for the client's next data."""
        if self._discarding or self._websocket is not None:
            return
        # A request whose body is incomplete is not busy: others must not wait for it.
        busy = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        if not busy:
            self._slot.wait()
        elif not self._slot.busy and not self._slot.begin():
            self._refuse(503, ALL_BUSY)
            return
        stage = (self.conn.their_state, self.cycle)
        if stage == self._stage:
            return
        self._stage = stage
        limits = self._slot.limits
        seconds = {h11.IDLE: limits.header_seconds, h11.SEND_BODY: limits.body_seconds}
        self._slot.set_deadline(seconds.get(self.conn.their_state))

    def _too_slow(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._refuse(408, f"the body did not arrive within {self._slot.limits.body_seconds:g} seconds")
        elif self._received:
            self._refuse(408, f"no whole request header arrived within {self._slot.limits.header_seconds:g} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str) -> None:
        """Answer if that is still possible, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": text}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), _CLOSE]
            headers += [_RETRY_AFTER] if status == 503 else []
            response = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
            head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
            for event in (response, *([] if head else [h11.Data(data=body)]), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._discard_rest()
        self._slot.set_deadline(self._slot.limits.close_seconds)

    def _discard_rest(self) -> None:
        """Half-close, and drop further data until the peer or a limit ends the connection.

        TLS has no half-close: there ``Connection: close`` in the answer must do.
        """
        self._discarding = True
        self._unset_keepalive_if_required()
        self._slot.wait()
        self._slot.half_close()
        self.flow.resume_reading()
        self._slot.on_deadline = self._slot.end


def _well_formed(subprotocols: bytes) -> bool:
    try:
        parse_subprotocol(subprotocols.decode("latin-1"))
    except InvalidHeaderFormat:
        return False
    return True
