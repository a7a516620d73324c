"""The verifier's end of one conversation without a network: frames in, frames out, in the caller's thread."""

from __future__ import annotations

from moa_runtime.session.handshake import Limits, check_hello
from moa_runtime.session.server import ServerSession, Verify, parse_client_message
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine import Engine
from moa_server.rounds import verify_round


class LoopbackVerifier:
    """A :class:`ServerSession` with a sequence of the engine, fed with the frames a client would send.

    Args:
        timeline: gets the spans of :func:`moa_server.rounds.verify_round`.
    """

    def __init__(self, engine: Engine, timeline: Timeline = NO_TIMELINE) -> None:
        self._fingerprints = engine.fingerprints
        self._session = ServerSession(Limits(max_context=engine.max_context), engine.vocab_size, engine.stop_tokens)
        self._sequence = engine.open()
        self._row_encoding: int = wire.ROW_ENCODING_UNSPECIFIED
        self._timeline = timeline

    def receive(self, frame: bytes) -> bytes | None:
        """Handle one frame.

        Returns:
            the frame that answers it, or None where nothing is to be said.
        """
        answer = self._handle(frame)
        return None if answer is None else answer.SerializeToString()

    def close(self) -> None:
        """Free the engine's cache of this conversation."""
        self._sequence.close()

    def _handle(self, frame: bytes) -> wire.ServerMessage | None:
        message = parse_client_message(frame)
        if isinstance(message, wire.ServerMessage):
            return message
        if message.WhichOneof("event") == "hello":
            self._row_encoding = message.hello.row_encoding
            return check_hello(message.hello, self._fingerprints) or self._session.welcome("loopback")
        work = self._session.receive(message)
        if isinstance(work, Verify):
            return verify_round(self._session, self._sequence, work, self._row_encoding, self._timeline)
        return work
