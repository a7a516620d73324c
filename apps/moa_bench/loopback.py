"""The verifier's end of one conversation without a network: frames in, frames out, in the caller's thread."""

from __future__ import annotations

import time

from moa_bench.pace import Pace
from moa_runtime.session.handshake import Limits, check_hello
from moa_runtime.session.server import ServerSession
from moa_runtime.session.work import RowsWork, Verify, parse_client_message
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import Engine, new_sequence
from moa_server.engine.blocking import BlockingEngine
from moa_server.scheduling.rounds import job_of, take_rows, verdict_of


class LoopbackVerifier:
    """A :class:`ServerSession` with a sequence of the engine, fed with the frames a client would send.

    Args:
        timeline: gets a span ``verify`` for each verdict, with the tokens drafted, accepted and prefilled.
        pace: of the target that it is said to be; None for the time that the engine takes.

    Attributes:
        compute_s: seconds that the last frame took the target.
    """

    def __init__(self, engine: Engine, timeline: Timeline = NO_TIMELINE, pace: Pace | None = None) -> None:
        self.compute_s = 0.0
        self._pace = pace
        self._fingerprints = engine.fingerprints
        limits = Limits(max_context=engine.max_context, trees=engine.capabilities.trees)
        self._session = ServerSession(limits, engine.vocab_size, engine.stop_tokens)
        self._engine = BlockingEngine(engine)
        self._sequence = new_sequence()
        self._timeline = timeline

    def receive(self, frame: bytes) -> list[bytes]:
        """Handle one frame; returns the frames that answer it."""
        self.compute_s = 0.0
        return [message.SerializeToString() for message in self._handle(frame)]

    def close(self) -> None:
        """Free the engine's cache of this conversation."""
        self._engine.release(self._sequence)
        self._engine.close()

    def _handle(self, frame: bytes) -> list[wire.ServerMessage]:
        message = parse_client_message(frame)
        if isinstance(message, wire.ServerMessage):
            return [message]
        if message.WhichOneof("event") == "hello":
            refused = check_hello(message.hello, self._fingerprints)
            return [refused] if refused is not None else self._session.greet(message.hello, "loopback")
        work = self._session.receive(message)
        said = [work] if isinstance(work, wire.ServerMessage) else []
        while work is not None and not isinstance(work, wire.ServerMessage):
            said += self._do(work)
            work = self._session.next_work()
        while (rows := self._session.take_rows()) is not None:
            said.append(rows)
        return said

    def _do(self, work: Verify | RowsWork) -> list[wire.ServerMessage]:
        began, began_ns = time.perf_counter(), time.time_ns()
        job = self._engine.run(job_of(work, self._sequence))
        if isinstance(work, RowsWork):
            take_rows(self._session, job)
            return []
        counts = {"drafted": len(work.draft), "accepted": len(job.path), "prefill": work.supplied}
        self._timeline.span("verify", began_ns, time.time_ns(), "verifier", **counts)
        tokens = 1 + len(work.draft) + max(0, work.supplied - 1)
        self.compute_s = time.perf_counter() - began if self._pace is None else self._pace.compute_s(tokens)
        return [verdict_of(self._session, work, job, self.compute_s)]
