"""A verifier on a simulated clock: its real scheduler over real jobs, and steps that take what they are said to."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from moa_bench.forecast.drafts import Shape
from moa_bench.forecast.times import KnownCost, Times
from moa_runtime.session.tree import walk
from moa_server.engine.base import Outcome, StepRequest, new_sequence
from moa_server.scheduling.scheduler import Scheduler, Step, Waiting
from moa_server.scheduling.step_cost import StepCost
from moa_server.scheduling.verify_job import Job

_RIGHT = 0  # what the target chooses everywhere; see Shape.tree


class Replica:
    """One process: it does one thing after the other, a step or the drafts that are asked for at the same time.

    What goes into a step, and how drafts and prompts are cut, is decided by :class:`scheduler.Scheduler`.

    Attributes:
        steps: that were run.
        tokens: that were processed, prompts and drafts included.
        busy_s: seconds in which it was not idle.
    """

    def __init__(self, env: simpy.Environment, times: Times) -> None:
        self.steps = self.tokens = 0
        self.busy_s = 0.0
        self._env, self._times = env, times
        self._cost = StepCost() if times.learns else KnownCost(times.target)
        self._scheduler = Scheduler(self._cost, None, times.cache_tokens, times.most_sequences)
        self._held: dict[int, int] = {}
        self._with_rows: set[int] = set()
        self._waiting: dict[int, simpy.Event] = {}  # by identity of the job
        self._drafting: list[tuple[Shape, simpy.Event]] = []
        self._more = env.event()
        env.process(self._run())

    @property
    def serving(self) -> int:
        """Conversations that wait for their next token, or got one lately."""
        return self._scheduler.serving

    def open(self, *, rows: bool) -> int:
        """A new conversation, of which nothing is held.

        Args:
            rows: whether memory rows are made of all its tokens.
        """
        sequence = new_sequence()
        self._held[sequence] = 0
        if rows:
            self._with_rows.add(sequence)
        return sequence

    def close(self, sequence: int) -> None:
        """Its answer has ended."""
        self._scheduler.rest(sequence)
        self._held.pop(sequence, None)
        self._with_rows.discard(sequence)

    def run(self, job: Job) -> simpy.Event:
        """Hand a job in; the event comes when it is done."""
        done = self._waiting[id(job)] = self._env.event()
        self._scheduler.add(Waiting(job, self._env.now))
        self._wake()
        return done

    def draft(self, shape: Shape) -> simpy.Event:
        """Let the verifier draft; the event's value is how long that took, seconds."""
        done = self._env.event()
        self._drafting.append((shape, done))
        self._wake()
        return done

    def _wake(self) -> None:
        if not self._more.triggered:
            self._more.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            yield self._env.timeout(0)  # who was answered, and has more work at hand, hands it in
            if self._drafting:
                yield from self._draft_together()
                continue
            step = self._scheduler.plan(self._env.now, self._held_of)
            if step.pieces:
                yield from self._take_step(step)
            else:
                self._more = self._env.event()
                yield self._more

    def _draft_together(self) -> Generator[simpy.Event, Any, None]:
        """All drafts that are asked for, their steps side by side."""
        asked, self._drafting = self._drafting, []
        deepest = max(len(shape.steps) for shape, _ in asked)
        seconds = self._times.server_drafter.seconds(deepest, sum(sum(shape.steps) for shape, _ in asked))
        self.busy_s += seconds
        yield self._env.timeout(seconds)
        for _, done in asked:
            done.succeed(seconds)

    def _take_step(self, step: Step) -> Generator[simpy.Event, Any, None]:
        outcomes = [_outcome(piece.request) for piece in step.pieces]
        seconds = self._times.target.seconds(step.tokens, step.products, step.contexts)
        for piece, outcome in zip(step.pieces, outcomes, strict=True):
            if piece.request.sequence in self._with_rows:
                seconds += (piece.prefill + len(outcome.path)) * self._times.row_s
        yield self._env.timeout(seconds)
        self.steps += 1
        self.tokens += step.tokens
        self._cost.observe(step.tokens, step.products, step.contexts, seconds)
        for piece, outcome in zip(step.pieces, outcomes, strict=True):
            job, request = piece.waiting.job, piece.request
            job.seconds += seconds
            job.take(request, outcome)
            if request.sequence in self._held:  # else its client has left
                self._held[request.sequence] = len(request.prefix) + len(outcome.path)
        self._scheduler.stepped(step, self._env.now)
        done = [piece.waiting.job for piece in step.pieces if piece.waiting.job.done]
        besides_s = len(done) * self._times.verdict_s
        yield self._env.timeout(besides_s)
        self.busy_s += seconds + besides_s
        for job in done:
            self._waiting.pop(id(job)).succeed()

    def _held_of(self, sequence: int, prefix: Sequence[int]) -> int:
        return min(self._held.get(sequence, 0), len(prefix))


def _outcome(request: StepRequest) -> Outcome:
    if request.sampling is None:
        return Outcome()
    path, token = walk(request.draft, request.parents, lambda node: _RIGHT)
    return Outcome(tuple(path), token)
