"""One WebSocket connection of a client: greet, then answer frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.websockets import WebSocket, WebSocketDisconnect

from moa_runtime.session.handshake import check_hello, fault
from moa_runtime.session.server import Verify, parse_client_message
from moa_runtime.timeline import Timeline
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine import Engine
from moa_server.rounds import verify_round
from moa_server.scheduler import Scheduler
from moa_server.sessions import Conversation, SessionStore
from moa_server.settings import Settings

_log = logging.getLogger(__name__)

# WebSocket close codes (RFC 6455 and the IANA registry).
NORMAL, GOING_AWAY, REFUSED, TRY_AGAIN_LATER = 1000, 1001, 1008, 1013


class _CloseError(Exception):
    """The connection is to be closed, or already is; ``code`` is None for the latter."""

    def __init__(self, code: int | None) -> None:
        self.code = code


class Connection:
    """Serves one accepted WebSocket until it ends. Whatever the client sends, at worst it gets a fault.

    Args:
        timeline: gets the spans ``receive``, ``queue`` (waiting for the engine's thread), ``verify``, ``rows`` and
            ``send`` of each frame.
    """

    def __init__(
        self,
        websocket: WebSocket,
        engine: Engine,
        scheduler: Scheduler,
        store: SessionStore,
        settings: Settings,
        timeline: Timeline,
    ) -> None:
        self._websocket, self._settings, self._timeline = websocket, settings, timeline
        self._engine, self._scheduler, self._store = engine, scheduler, store
        self._encoding = wire.ROW_ENCODING_UNSPECIFIED
        self._claim = asyncio.Event()  # set when another connection takes the conversation over
        # A track for each connection: the last send of one that hangs may last into the next one's work.
        self._track = "no session"

    async def serve(self) -> None:
        try:
            conversation = await self._greet()
            try:
                while True:
                    await self._answer(conversation, await self._next_frame(self._settings.idle_seconds))
            finally:
                self._store.detach(conversation, self._claim)
        except _CloseError as closed:
            if closed.code is not None:
                with contextlib.suppress(WebSocketDisconnect):
                    await self._websocket.close(closed.code)
        except WebSocketDisconnect:
            pass

    async def _greet(self) -> Conversation:
        """Take the Hello and send the Welcome."""
        message = self._parse(await self._next_frame(min(self._settings.hello_seconds, self._settings.idle_seconds)))
        if isinstance(message, wire.ServerMessage):
            await self._refuse(message, REFUSED)
        if message.WhichOneof("event") != "hello":
            text = f"a connection begins with Hello, not with {message.WhichOneof('event')}"
            await self._refuse(fault(wire.FAULT_CODE_PROTOCOL, text), REFUSED)
        hello = message.hello
        refused = check_hello(hello, self._engine.fingerprints)
        if refused is None and hello.row_encoding not in wire.RowEncoding.values():
            refused = fault(wire.FAULT_CODE_PROTOCOL, f"this verifier knows no row encoding {hello.row_encoding}")
        if refused is not None:
            await self._refuse(refused, REFUSED)
        attached = self._store.attach(hello.resume_token)
        if attached is None:
            text = f"this verifier already serves {len(self._store)} sessions; try again later"
            busy = fault(wire.FAULT_CODE_BUSY, text, retry_after_ms=self._settings.retry_after_ms)
            await self._refuse(busy, TRY_AGAIN_LATER)
        conversation, self._claim = attached
        self._track = f"session {conversation.number}, connection {conversation.connections}"
        if self._engine.fingerprints.drafter:
            self._encoding = hello.row_encoding
        try:
            async with conversation.lock:  # a call for the connection before may still run
                welcome = conversation.session.welcome(conversation.token)
            await self._send(welcome)
        except BaseException:
            self._store.detach(conversation, self._claim)
            raise
        return conversation

    async def _answer(self, conversation: Conversation, frame: bytes | None) -> None:
        """Take one frame to its verdict or fault, if it has one."""
        with self._timeline.measure("receive", self._track, bytes=len(frame or b"")):
            message = self._parse(frame)
        if isinstance(message, wire.ServerMessage):
            await self._send(message)
            return
        event = message.WhichOneof("event")
        if event == "bye":
            raise _CloseError(NORMAL)
        async with conversation.lock:
            if self._claim.is_set():
                return  # the next receive says so
            answer = conversation.session.receive(message)
            if isinstance(answer, Verify):
                answer = await self._verify(conversation, answer)
        if answer is not None:
            await self._send(answer)

    async def _verify(self, conversation: Conversation, work: Verify) -> wire.ServerMessage:
        asked_ns = time.time_ns()

        def run() -> wire.ServerMessage:
            self._timeline.span("queue", asked_ns, time.time_ns(), self._track)
            session, sequence = conversation.session, conversation.sequence
            return verify_round(session, sequence, work, self._encoding, self._timeline, self._track)

        try:
            verdict = await self._scheduler.run(run)
            await self._store.used(conversation)
        except Exception:
            _log.exception("the engine failed on a draft of %d tokens at %d", len(work.draft), len(work.prefix))
            text = "the verifier failed on this frame; sending it again may help"
            return fault(wire.FAULT_CODE_INTERNAL, text, retry_after_ms=self._settings.retry_after_ms)
        return verdict

    async def _next_frame(self, seconds: float) -> bytes | None:
        """What the client sends next; None for text.

        Raises:
            _CloseError: the client left, was silent for ``seconds``, or was replaced.
        """
        frame = asyncio.ensure_future(self._websocket.receive())
        replaced = asyncio.ensure_future(self._claim.wait())
        try:
            await asyncio.wait({frame, replaced}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._claim.is_set():
                text = "another connection continued this conversation"
                await self._refuse(fault(wire.FAULT_CODE_REPLACED, text), REFUSED)
            if not frame.done():
                text = f"nothing was received for {seconds:g} seconds"
                await self._refuse(fault(wire.FAULT_CODE_IDLE, text), GOING_AWAY)
            if frame.result()["type"] == "websocket.disconnect":
                raise _CloseError(None)
            return frame.result().get("bytes")
        finally:
            frame.cancel()
            replaced.cancel()

    def _parse(self, frame: bytes | None) -> wire.ClientMessage | wire.ServerMessage:
        """The message, or the fault that answers the frame."""
        if frame is None:
            return fault(wire.FAULT_CODE_PROTOCOL, "a text frame; this protocol is binary")
        if len(frame) > self._settings.max_frame_bytes:
            text = f"a frame of {len(frame)} bytes; this verifier takes {self._settings.max_frame_bytes}"
            return fault(wire.FAULT_CODE_TOO_LARGE, text)
        return parse_client_message(frame)

    async def _refuse(self, message: wire.ServerMessage, code: int) -> None:
        """Send a fault and close."""
        await self._send(message)
        raise _CloseError(code)

    async def _send(self, message: wire.ServerMessage) -> None:
        data = message.SerializeToString()
        with self._timeline.measure("send", self._track, bytes=len(data)):
            await self._websocket.send_bytes(data)
