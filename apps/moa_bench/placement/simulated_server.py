"""A verifier on a simulated clock: the real session and the real drafts, and passes that take what they are said to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from moa_bench.placement.scenarios import Times
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.budgets import within
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.drafting.settings import Conditions
from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import ServerSession
from moa_runtime.session.tree import DraftTree
from moa_runtime.session.work import RowsWork, Verify, parse_client_message
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import Engine, new_sequence
from moa_server.engine.blocking import BlockingEngine
from moa_server.scheduling.rounds import job_of, take_rows, verdict_of


class SimulatedServer:
    """One conversation's end. It does one thing after the other, each as soon as it may begin: a frame that has come,
    else what is to be pushed, else memory rows.

    Args:
        times: those of the moment.
        drafter: the server's own; None, and it only decodes for itself.

    Attributes:
        sent: frames on their way to the device, and when they come.
    """

    def __init__(self, engine: Engine, times: Callable[[], Times], drafter: Drafter | None, seed: int) -> None:
        self.sent: deque[tuple[float, bytes]] = deque()
        self._times, self._drafter, self._controller = times, drafter, Throughput(shared_steps=True)
        self._engine, self._sequence = BlockingEngine(engine), new_sequence()
        limits = Limits(max_context=engine.max_context, trees=engine.capabilities.trees)
        self._session = ServerSession(limits, engine.vocab_size, engine.stop_tokens)
        self._limits = limits
        self._coming: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0
        self._random = random.Random(seed)
        self._stamped: tuple[int, float] | None = None

    def send(self, frame: bytes, now: float) -> None:
        """The device sends a frame."""
        self._coming.append((self._arrival(now, self._coming), frame))

    def act(self, until: float) -> bool:
        """Do the next thing if it begins by then; says whether there was one."""
        came = self._coming[0][0] if self._coming else float("inf")
        if came <= self._free_at:
            return self._take(self._free_at)
        # Looking for work does not change the session, but for whose turn it is.
        work = self._session.next_work() if self._free_at <= until else None
        if work is not None:
            self._free_at = self._do(work, self._free_at)
            return True
        rows = self._session.take_rows() if self._free_at <= until else None
        if rows is not None:
            self._say(rows, self._free_at)
            return True
        return came <= until and self._take(came)

    def close(self) -> None:
        """Free the engine's cache."""
        self._engine.release(self._sequence)
        self._engine.close()

    def _take(self, now: float) -> bool:
        came, frame = self._coming.popleft()
        message = parse_client_message(frame)
        assert isinstance(message, wire.ClientMessage)
        self._free_at = now
        if message.WhichOneof("event") == "hello":
            capabilities = [] if self._drafter is None else [wire.CAPABILITY_DRAFTS]
            for said in self._session.greet(message.hello, "simulated", capabilities=capabilities):
                self._say(said, now)
            return True
        stamp = getattr(getattr(message, message.WhichOneof("event")), "stamp", 0)
        self._stamped = (stamp, came) if stamp else self._stamped
        work = self._session.receive(message)
        if isinstance(work, wire.ServerMessage):
            self._say(work, now)
        elif work is not None:
            self._free_at = self._do(work, now)
        return True

    def _do(self, work: Verify | RowsWork, now: float) -> float:
        """When it is done."""
        times = self._times()
        if isinstance(work, RowsWork):
            take_rows(self._session, self._engine.run(job_of(work, self._sequence)))
            self._send_rows(now)
            return now
        tree, draft_s = self._draft(work) if work.pushed else (None, 0.0)
        if tree is not None:
            work = replace(work, draft=tree.tokens, parents=tree.parents)
        job = self._engine.run(job_of(work, self._sequence))
        compute_s = times.pass_s + times.token_s * (1 + len(work.draft) + max(0, work.supplied - 1))
        waited_s = times.queue_s + compute_s
        done = now + draft_s + waited_s
        if tree is not None:
            self._controller.observe(
                RoundEnded(0, len(tree.tokens), tree.depth, len(job.path), tree.steps, draft_s, waited_s, compute_s)
            )
        self._say(verdict_of(self._session, work, job, compute_s, draft_s), done)
        self._send_rows(done)
        return done

    def _draft(self, work: Verify) -> tuple[DraftTree | None, float]:
        """The server's own draft, and what it takes."""
        times, room = self._times(), self._session.room
        if self._drafter is None or times.server_step_s is None or room is None or room < 2:
            return None, 0.0
        budget = within(self._controller.budget(), self._limits, room - 1, Conditions())
        tree = self._drafter.propose(work.prefix, budget, work.sampling)
        return tree, len(tree.steps) * times.server_step_s + sum(tree.steps) * times.server_query_s

    def _send_rows(self, now: float) -> None:
        while (rows := self._session.take_rows()) is not None:
            self._say(rows, now)
            if self._session.pushes:
                break

    def _say(self, message: wire.ServerMessage, now: float) -> None:
        event = message.WhichOneof("event")
        if self._stamped is not None and event in ("verdict", "standing"):
            (stamp, came), self._stamped = self._stamped, None
            getattr(message, event).echo.CopyFrom(wire.Echo(stamp=stamp, held_us=int(1e6 * (now - came))))
        self.sent.append((self._arrival(now, self.sent), message.SerializeToString()))

    def _arrival(self, now: float, before: Sequence[tuple[float, bytes]]) -> float:
        """Frames keep their order."""
        times = self._times()
        comes = now + times.trip_s / 2 * (1 + times.jitter * self._random.random())
        return max(comes, before[-1][0]) if before else comes
