"""Worker: runs jobs on an engine, step by step."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import Engine
from moa_server.logging import log_unexpected
from moa_server.metrics import Metrics
from moa_server.scheduling.scheduler import MOST_SEQUENCES, Piece, Scheduler, Step, Waiting
from moa_server.scheduling.step_cost import Load, StepCost, StepSeconds
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, GivenUpError, Job

_log = logging.getLogger(__name__)

#: Lets the verifier draft for the rounds of the coming step, given what the step takes with more drafted tokens, the
#: seconds of a memory row, and the least gain of drafts; says whether there is anything new.
Prepare = Callable[[Sequence[Job], StepSeconds, float, float], Awaitable[bool]]


class _PendingJobs:
    """Futures of the jobs that wait or run, and the contexts whose log fields name their sessions."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[asyncio.Future[None], contextvars.Context]] = {}  # by the identity of the job

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, job: Job) -> asyncio.Future[None]:
        """Return the future that resolves when the job is done."""
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[id(job)] = result, contextvars.copy_context()
        return result

    def remove(self, job: Job) -> None:
        """Forget a job: its result is no longer wanted."""
        result, _ = self._pending.pop(id(job))
        if result.done() and not result.cancelled():
            result.exception()  # retrieved, even if the caller left at the same time, so asyncio logs no warning

    def resolve(self, job: Job) -> None:
        """Report that a job is done."""
        result, _ = self._pending.get(id(job), (None, None))
        if result is not None and not result.done():
            result.set_result(None)

    def fail(self, job: Job, error: BaseException | None) -> None:
        """Report that the engine failed on a job; log the error, if any, with the fields of the job's session."""
        result, context = self._pending.get(id(job), (None, contextvars.Context()))  # its caller may have left
        if error is not None:
            context.run(_log_failure, job, error)
        if result is not None and not result.done():
            result.set_exception(EngineFailedError())

    def fail_all(self, error: Exception) -> None:
        """Report ``error`` to all jobs."""
        for result, _ in self._pending.values():
            if not result.done():
                result.set_exception(error)


def _log_failure(job: Job, error: BaseException) -> None:
    size = f"a draft of {job.draft_length} tokens after {len(job.prefix)}"
    _log.error("the engine failed on %s: %s: %s", size, type(error).__name__, error)
    _log.debug("where it failed", exc_info=error)


#: Reason of a job without a result, by the exception of :meth:`Worker.run`.
_REASONS: dict[type[BaseException], str] = {
    **{ExpiredError: "expired", EngineFailedError: "failed"},
    **{GivenUpError: "given up", asyncio.CancelledError: "left"},
}

#: Most turns of the event loop between two steps, in which conversations that got a result announce or submit their
#: next job, or that they have none. A turn takes some 10 microseconds; most conversations need ten.
_BREATHS = 40


class Worker:
    """Runs the jobs of one engine. All methods belong to the event loop's thread.

    Args:
        step_tokens: see :class:`Scheduler`.
        prepare: the verifier's own drafting, if there is any.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        step_tokens: int | None = None,
        prepare: Prepare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cost = StepCost()
        self._prepare = prepare
        self._load = Load()
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._scheduler = Scheduler(self.cost, step_tokens, engine.cache_use[1])
        self._pending = _PendingJobs()
        self._released: set[int] = set()  # once the engine is done with their steps
        self._under_way: asyncio.Task[dict[int, BaseException]] | None = None
        self._unscheduled: dict[int, asyncio.Task[None]] = {}  # by sequence
        self._undecided: set[int] = set()  # sequences that got a result, and may submit their next job at once
        self._more = asyncio.Event()
        self._last = Step()
        self._thread_s = 0.0  # processor time of the event loop's thread at the end of the last step
        self._given_up = False
        self._loop: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Jobs that wait or are being worked on."""
        return len(self._pending)

    @property
    def load(self) -> wire.Load:
        """The current load, for a Welcome."""
        return self._load.message(self._scheduler.serving)

    @property
    def serving(self) -> int:
        """Number of sequences that wait for their next token or got one lately; 0 for engines that schedule
        themselves."""
        return self._scheduler.serving

    @property
    def searches(self) -> bool:
        """See :attr:`Scheduler.searches`."""
        return self._scheduler.searches

    @property
    def memory_row_s(self) -> float:
        """Seconds that a memory row takes if each of those that are being served gets one in a step."""
        count = max(1, self.serving)
        return self.cost.memory_seconds(count) / count

    @property
    def prices(self) -> tuple[float, float]:
        """See :attr:`Scheduler.rate` and :attr:`Scheduler.price`."""
        return self._scheduler.rate, self._scheduler.price

    def step_cost(self) -> dict[str, float]:
        """Return the expected milliseconds of a step of all that are being served, by its number of tokens."""
        rows, sequences = np.array([*range(1, 33), *range(40, 4 * MOST_SEQUENCES + 1, 8)]), max(1, self.serving)
        context = self._last.contexts / max(1, len(self._last.pieces))
        seconds = self.cost.curve(rows, rows * context, np.array(sequences * context), sequences)
        return {str(count): round(1000 * float(each), 3) for count, each in zip(rows, seconds, strict=True)}

    async def run(self, job: Job, within: float, after: float = 0.0, *, background: bool = False) -> None:
        """Do a job; when this is cancelled, the job is dropped before the next step.

        Args:
            within: most seconds from its start to its result.
            after: seconds to wait before it starts.
            background: use only steps that no other job wants; ignored by engines that schedule themselves.

        Raises:
            ExpiredError: it took longer than ``within``.
            EngineFailedError: the engine failed on it.
            GivenUpError: the verifier is shutting down.
        """
        if self._given_up:
            raise GivenUpError
        result = self._pending.add(job)
        unscheduled: asyncio.Task[None] | None = None
        try:
            if after > 0 and (await asyncio.wait({result}, timeout=after))[0]:
                result.result()
            waiting = Waiting(job, self._clock(), background)
            if self._engine.capabilities.schedules_itself:
                unscheduled = asyncio.create_task(self._run_unscheduled(waiting))
            else:
                self._scheduler.add(waiting)
                self._undecided.discard(job.sequence)
                self._more.set()
                if self._loop is None:  # in no session's context
                    self._loop = contextvars.Context().run(asyncio.create_task, self._run())
            if not (await asyncio.wait({result}, timeout=within))[0]:
                raise ExpiredError
            result.result()
        except tuple(_REASONS) as error:
            self._metrics.dropped(_REASONS[type(error)])
            raise
        finally:
            self._pending.remove(job)
            self._scheduler.drop(job)
            if unscheduled is not None:
                unscheduled.cancel()

    def give_up(self) -> None:
        """Fail all present and future jobs with GivenUpError."""
        self._given_up = True
        self._pending.fail_all(GivenUpError())

    def parked(self, sequence: int) -> None:
        """Note that a sequence has no next job until its client sends a frame: no step waits for it."""
        self._undecided.discard(sequence)

    def rest(self, sequence: int) -> None:
        """Note that no client waits for the next token of a sequence: others may use all of a step."""
        self.parked(sequence)
        self._scheduler.rest(sequence)

    def release(self, sequence: int) -> None:
        """Let the engine forget a sequence, after the step under way."""
        self.rest(sequence)
        if self._under_way is not None or sequence in self._unscheduled:
            self._released.add(sequence)
        else:
            self._engine.release(sequence)

    async def close(self) -> None:
        """Wait for the step under way, forget everything else. The engine stays open."""
        if self._loop is not None:
            self._loop.cancel()
        ending = [self._loop, self._under_way, *self._unscheduled.values()]
        await asyncio.gather(*filter(None, ending), return_exceptions=True)

    # -- an engine that we schedule ----------------------------------------------------------------

    async def _run(self) -> None:
        self._thread_s = time.thread_time()
        while True:
            try:
                await self._turn()
            except Exception as error:  # otherwise no job would ever be answered again
                log_unexpected(_log, "a step", error)
                self._pending.fail_all(EngineFailedError())
                await asyncio.sleep(0)  # they drop their jobs

    async def _turn(self) -> None:
        """Take one step, or wait until there is something to do."""
        await self._breathe()
        await self._take_drafts(self._scheduler.waiting_rounds())
        step = self._scheduler.plan(self._clock(), self._engine.held)
        for job, error in step.failed:
            self._pending.fail(job, error)
        if step.pieces:
            await self._take_step(step)
        elif not len(self._scheduler):
            self._more.clear()
            await self._more.wait()

    async def _take_step(self, step: Step) -> None:
        began = self._clock()
        self._under_way = asyncio.create_task(self._step(step.pieces))
        failures = await asyncio.shield(self._under_way)  # a step is never broken off
        ended = self._clock()
        self._load.stepped(began - min(piece.waiting.since for piece in step.pieces), ended - began)
        if not failures and step.tokens:  # memory rows alone tell nothing of the target
            self._learn(step, ended - began)
        self._last = step
        self._metrics.stepped(step, began, ended)
        thread_s = time.thread_time()
        self._scheduler.stepped(step, ended, thread_s - self._thread_s)
        self._thread_s = thread_s
        for piece in step.pieces:
            job = piece.waiting.job
            job.seconds += ended - began
            if id(job) in failures:
                self._scheduler.drop(job)
                self._pending.fail(job, failures[id(job)])
            elif job.done:
                self._undecided.add(job.sequence)
                self._pending.resolve(job)

    def _learn(self, step: Step, seconds: float) -> None:
        sizes = step.tokens, step.products, step.contexts, len(step.pieces)
        self.cost.observe(*sizes, seconds, step.memory_rows)

    async def _breathe(self) -> None:
        """Let conversations that got a result submit their next job."""
        for _ in range(_BREATHS):
            await asyncio.sleep(0)
            if not self._undecided:
                break
        self._undecided.clear()

    async def _take_drafts(self, jobs: Sequence[Job]) -> None:
        """Let jobs take the newest drafts, and the verifier make some where that pays."""
        for job in jobs:
            job.take_newest()
        if self._prepare is None or not jobs:
            return
        rounds = []
        for job in jobs:
            with contextlib.suppress(Exception):  # of the engine, which the plan reports
                held = self._engine.held(job.sequence, job.prefix)
                if not job.prefills(held):
                    rounds.append((job, held))
        began, serving = self._clock(), self._scheduler.serving
        # Rows that a draft in a step of few needs would also be made in the steps of all.
        if 2 * len(rounds) > serving and await self._prepare(
            [job for job, _ in rounds],
            lambda drafted: self._scheduler.seconds_with(drafted, rounds),
            self.memory_row_s,
            self._scheduler.gain.least(serving, modelled=True),
        ):
            for job, _ in rounds:
                job.take_newest()
                job.drafting_s += self._clock() - began
        for job in set(self._scheduler.waiting_rounds()).difference(jobs):  # submitted meanwhile
            job.take_newest()

    async def _step(self, pieces: list[Piece]) -> dict[int, BaseException]:
        """Run one step; if it fails, run each piece alone, so that one failing piece does not affect the others.

        Returns:
            the errors of the jobs that also failed alone, by the identity of the job.
        """
        try:
            return await self._step_or_split(pieces)
        finally:
            self._under_way = None
            while self._released:
                self._engine.release(self._released.pop())

    async def _step_or_split(self, pieces: list[Piece]) -> dict[int, BaseException]:
        try:
            outcomes = await self._engine.step([piece.request for piece in pieces])
        except (Exception, asyncio.CancelledError) as error:  # a step is not ours to cancel: an engine's own fault
            if len(pieces) == 1:
                return {id(pieces[0].waiting.job): error}
            alone = [await self._step_or_split([piece]) for piece in pieces]
            return {job: failure for failures in alone for job, failure in failures.items()}
        for piece, outcome in zip(pieces, outcomes, strict=True):
            piece.waiting.job.take(piece.request, outcome)
        return {}

    # -- an engine that schedules itself -----------------------------------------------------------

    async def _run_unscheduled(self, waiting: Waiting) -> None:
        """Do a job, once the engine is done with the sequence's job before; that may have been dropped."""
        sequence = waiting.job.sequence
        while (before := self._unscheduled.get(sequence)) is not None:
            await asyncio.wait({before})

        def left(_: object) -> None:  # the engine is done with the job
            del self._unscheduled[sequence]
            if sequence in self._released:
                self._released.remove(sequence)
                self._engine.release(sequence)

        steps = self._unscheduled[sequence] = asyncio.create_task(self._steps(waiting))
        steps.add_done_callback(left)
        try:
            await asyncio.wait({steps})
        finally:
            steps.cancel()

    async def _steps(self, waiting: Waiting) -> None:
        job, most = waiting.job, self._engine.max_context
        try:
            while not job.done:
                await self._take_drafts([] if job.source is None else [job])
                held = self._engine.held(job.sequence, job.prefix)
                piece = self._scheduler.piece_alone(waiting, held, most)
                began = self._clock()
                [outcome] = await self._engine.step([piece.request])
                job.take(piece.request, outcome)
                ended = self._clock()
                job.seconds += ended - began
                step = Step([piece])
                self._learn(step, ended - began)
                self._metrics.stepped(step, began, ended)
                waiting.started = True
        except Exception as error:
            self._pending.fail(job, error)
        except asyncio.CancelledError:  # the job was dropped; else it is the engine's own fault
            self._pending.fail(job, None)
            raise
        else:
            self._pending.resolve(job)
