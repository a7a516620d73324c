"""One answer as its client sees it, by who drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from moa_bench.forecast.drafts import Drafts, Shape
from moa_bench.forecast.replica import Replica
from moa_bench.forecast.times import Times
from moa_bench.latency import Burst
from moa_bench.server.record import AnswerRecord
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.drafter_selection import Placement
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.options import Drafting
from moa_runtime.session.sampling import Sampling
from moa_server.scheduling.verify_job import Job
from moa_server.sessions import asked_to_draft
from moa_server.settings import Settings

_GREEDY = Sampling()
_TEXT = 0  # every token; see Shape.tree

Process = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True)
class Question:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int


@dataclass
class Verifier:
    """A replica and what its conversations share.

    Attributes:
        known: the controller of the verdict on a draft of the verifier's that came last.
        trips: round trips of the answers that are written for clients that can draft, seconds.
    """

    replica: Replica
    known: Throughput = field(default_factory=lambda: Throughput(shared_steps=True))
    trips: dict[int, float] = field(default_factory=dict)

    @property
    def sharing(self) -> int:
        """Conversations that share the target, as a verdict tells."""
        return max(1, self.replica.serving)

    def asks(self, sequence: int) -> bool:
        """Whether a client is asked to draft."""
        return sequence in asked_to_draft(self.trips, len(self.trips), Settings().ask_from)


@dataclass
class Client:
    """A device and its link; what it learns of them, and of the verifier, it knows in its next answer too.

    Args:
        mode: one of :data:`moa_bench.server.MODES`.
        trip_s: of its link, there and back.
        draws: what is drawn from for each round.
        processors: that devices share, as the clients of a benchmark do; None, and each has its own.
    """

    env: simpy.Environment
    verifier: Verifier
    drafts: Drafts
    times: Times
    mode: str
    trip_s: float
    draws: random.Random
    processors: simpy.Resource | None = None

    def __post_init__(self) -> None:
        self._controller = Throughput()

    def answer(self, question: Question, keep: Callable[[AnswerRecord], None]) -> Process:
        """Ask a question in a new conversation, and wait for the end of its answer.

        Args:
            keep: called with the record when the question is sent; it grows.
        """
        record = AnswerRecord(self.env.now)
        keep(record)
        task = self.drafts.task(self.draws)
        sequence = self.verifier.replica.open(rows=self.mode != "stream")
        if self.mode == "auto":
            self.verifier.trips[sequence] = self.trip_s
        writing = _Writing(self, record, question, sequence, task)
        try:
            yield self.env.timeout(self.trip_s / 2)
            yield from writing.first(self._controller)
            if self.mode == "stream":
                yield from writing.stream()
            else:
                yield from writing.draft(self._controller, self.mode)
            yield self.env.timeout(self.trip_s / 2)
        finally:
            self.verifier.trips.pop(sequence, None)
            self.verifier.replica.close(sequence)


class _Writing:
    """An answer under way. All times are the verifier's; a client sees them half a round trip later."""

    def __init__(self, client: Client, record: AnswerRecord, question: Question, sequence: int, task: str) -> None:
        self._env, self._verifier, self._drafts = client.env, client.verifier, client.drafts
        self._device, self._trip_s, self._draws = client.times.device, client.trip_s, client.draws
        self._processors = client.processors
        self._record, self._sequence, self._task = record, sequence, task
        self._prompt, self._left = question.prompt, question.answer
        self._prefix = [_TEXT] * question.prompt
        self._server = client.verifier.known.sibling()

    def first(self, controller: Throughput) -> Process:
        """The prompt's verdict, which is the first token."""
        began, job = self._env.now, Job(self._sequence, self._prefix, _GREEDY)
        yield self._verifier.replica.run(job)
        waited_s = self._env.now - began + self._trip_s
        controller.observe(RoundEnded(self._prompt, 0, 0, 0, (), 0.0, waited_s, job.seconds, self._verifier.sharing))
        self._arrived(1)

    def stream(self) -> Process:
        """Token by token."""
        while self._left:
            yield self._verifier.replica.run(Job(self._sequence, self._prefix, _GREEDY))
            self._arrived(1)

    def draft(self, controller: Throughput, mode: str) -> Process:
        """In rounds of the device, of the server, or of whoever the runtime lets draft."""
        drafting: Drafting = "device" if mode == "device" else "server" if mode == "server" else "auto"
        placement = Placement(drafting, able=True)
        placement.server_drafts = True
        placement.trip(self._trip_s)
        while self._left:
            placement.drafts_wanted = mode == "auto" and self._verifier.asks(self._sequence)
            if placement.at_server:
                yield from self._server_round(placement, controller)
            else:
                yield from self._device_round(placement, controller)

    def _server_round(self, placement: Placement, controller: Throughput) -> Process:
        before = self._env.now
        shape = self._shape(self._server)
        draft_s = 0.0
        if shape.steps:
            draft_s = yield self._verifier.replica.draft(shape)
        began = self._env.now
        job, drafted = yield from self._verified(shape)
        accepted, sharing = len(job.path), self._verifier.sharing
        self._server.observe(_round(shape, drafted, accepted, draft_s, self._env.now - began, job.seconds, sharing))
        self._verifier.known = self._server
        since_s = self._env.now - before
        controller.observe(Pushed(drafted, accepted, since_s, job.seconds, sharing))
        placement.pushed(accepted + 1, since_s, draft_s + controller.token_s * drafted)
        self._arrived(accepted + 1)
        if placement.wants_trial:
            self._try(placement, controller)

    def _device_round(self, placement: Placement, controller: Throughput) -> Process:
        shape = self._shape(controller)
        yield self._env.timeout(self._trip_s / 2)
        draft_s = yield from self._drafted(shape)
        yield self._env.timeout(self._trip_s / 2)
        began = self._env.now
        job, drafted = yield from self._verified(shape)
        accepted, waited_s = len(job.path), self._env.now - began + self._trip_s
        outcome = _round(shape, drafted, accepted, draft_s, waited_s, job.seconds, self._verifier.sharing)
        controller.observe(outcome)
        placement.round_ended(outcome, accepted + 1)
        self._arrived(accepted + 1)

    def _try(self, placement: Placement, controller: Throughput) -> None:
        """A draft of the device that is not sent, compared with what the server writes (shadow_draft)."""
        shape = self._shape(controller)
        draft_s = self._device.seconds(len(shape.steps), sum(shape.steps))
        waited_s = placement.round_s + controller.token_s * shape.nodes
        accepted, sharing = shape.draw(self._task, self._draws), self._verifier.sharing
        outcome = _round(shape, shape.nodes, accepted, draft_s, waited_s, None, sharing)
        controller.observe(outcome)
        placement.tried(outcome)

    def _shape(self, controller: Throughput) -> Shape:
        """What a controller would have drafted; nothing before an answer's last token."""
        if self._left < 2:
            return self._drafts.shapes[0]
        return self._drafts.chosen(controller.prices, controller.budget().levels, self._task)

    def _drafted(self, shape: Shape) -> Generator[simpy.Event, Any, float]:
        """Let the device draft; says how long that took."""
        began, seconds = self._env.now, self._device.seconds(len(shape.steps), sum(shape.steps))
        if self._processors is None:
            yield self._env.timeout(seconds)
        else:
            with self._processors.request() as turn:
                yield turn
                yield self._env.timeout(seconds)
        return self._env.now - began

    def _verified(self, shape: Shape) -> Generator[simpy.Event, Any, tuple[Job, int]]:
        """A draft's job, done, and how many tokens it had."""
        tree = shape.tree(min(shape.draw(self._task, self._draws), self._left - 1))
        job = Job(self._sequence, self._prefix, _GREEDY, tree.tokens, tree.parents)
        yield self._verifier.replica.run(job)
        return job, len(tree.tokens)

    def _arrived(self, tokens: int) -> None:
        self._prefix += [_TEXT] * tokens
        self._left -= tokens
        self._record.bursts.append(Burst(self._env.now + self._trip_s / 2, tokens))


def _round(
    shape: Shape, drafted: int, accepted: int, draft_s: float, waited_s: float, compute_s: float | None, sharing: int
) -> RoundEnded:
    depth = max(shape.depth, accepted)
    return RoundEnded(0, drafted, depth, accepted, shape.steps, draft_s, waited_s, compute_s, sharing)
