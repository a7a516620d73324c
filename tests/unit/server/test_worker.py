"""Jobs on engines of several kinds: results, dropped and failed jobs, deadlines, and what steps wait for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from moa_runtime.session.events import Sampling
from moa_server.engine.base import Capabilities, new_sequence
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, Job, PricedDraft
from moa_server.scheduling.worker import Worker
from support.toy_engine import VOCAB, ToyEngine, plain
from support.virtual_loop import run_virtually

CHAINS = Capabilities(trees=False, max_draft_tokens=8)
ITSELF = Capabilities(trees=False, max_draft_tokens=8, schedules_itself=True)
KINDS = {
    "trees": {},
    "chains, preempting": {"capabilities": CHAINS, "preempts": 0.2},
    "schedules itself, preempting": {"capabilities": ITSELF, "preempts": 0.2},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def toy(request) -> ToyEngine:
    return ToyEngine(**request.param)


def with_worker(engine: ToyEngine, scenario) -> None:
    """Run ``scenario(worker, loop)`` on a virtual clock."""

    async def run(loop) -> None:
        worker = Worker(engine, Metrics(), clock=loop.time)
        await scenario(worker, loop)
        await worker.close()

    run_virtually(run)


def job(prefix=(1, 2)) -> Job:
    return Job(new_sequence(), list(prefix), Sampling())


async def answer(worker: Worker, engine: ToyEngine, prompt: list[int], count: int, rng: random.Random) -> None:
    """Rounds of chains, each token right two times out of three; the text must be the target's."""
    sequence, tokens, seed = new_sequence(), list(prompt), rng.randrange(100)
    while len(tokens) < len(prompt) + count:
        draft: list[int] = []
        for _ in range(rng.randint(0, 6)):
            right = engine.choice([*tokens, *draft], seed)
            draft.append(right if rng.random() < 2 / 3 else rng.randrange(1, VOCAB))
        job = Job(sequence, tokens, Sampling(1.0, 1.0, seed), draft, range(len(draft)), rows_from=0)
        await worker.run(job, 30)
        tokens += [draft[index] for index in job.path] + [job.token]
        assert job.rows.start == 0 and len(job.rows.keys) == len(tokens) - 1
        if rng.random() < 0.1:
            worker.release(sequence)  # its cache comes back by itself
    worker.release(sequence)
    assert tokens[len(prompt) :][:count] == plain(engine, prompt, count, seed)


def test_many_answers_at_once_are_each_what_the_target_writes(toy):
    async def scenario(worker, loop) -> None:
        rng = random.Random(3)
        prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.choice([3, 40, 300]))] for _ in range(12)]
        await asyncio.gather(*(answer(worker, toy, prompt, 20, rng) for prompt in prompts))
        assert not len(worker) and not toy.sequences_open

    with_worker(toy, scenario)


class Offer:
    def newest(self) -> PricedDraft:
        return PricedDraft([3], [0], [0.99])


def test_a_job_that_comes_while_others_are_drafted_for_has_its_draft_in_the_same_step():
    async def scenario(loop) -> None:
        first, second = (Job(new_sequence(), [1, 2], Sampling(), source=Offer()) for _ in range(2))
        running: list[asyncio.Task[None]] = []

        async def prepare(*about: object) -> bool:
            if not running:
                running.append(asyncio.create_task(worker.run(second, 30)))
                await asyncio.sleep(0.01)
            return False

        worker = Worker(engine := ToyEngine(), Metrics(), prepare=prepare, clock=loop.time)
        await worker.run(first, 30)
        await running[0]
        assert first.verified == second.verified == [0] and len(engine.steps) == 1
        await worker.close()

    run_virtually(scenario)


def test_a_dropped_job_is_gone_within_two_steps(toy):
    async def scenario(worker, loop) -> None:
        dropped = job([1] * 900)
        running = asyncio.create_task(worker.run(dropped, 30))
        while not toy.steps:
            await asyncio.sleep(0)
        before = len(toy.steps)
        running.cancel()
        for _ in range(2):
            await worker.run(job(), 30)
        later = [request.sequence for step in toy.steps[before + 1 :] for request in step]
        assert running.cancelled() and dropped.sequence not in later

    with_worker(toy, scenario)


@pytest.mark.parametrize("fails", ["step", "held"])
def test_a_job_that_fails_harms_no_other(toy, caplog, fails):
    bad, good, held = job(), job([3, 4]), toy.held

    def failing(sequence, prefix):
        if sequence == bad.sequence:
            raise KeyError("lost")
        return held(sequence, prefix)

    async def scenario(worker, loop) -> None:
        if fails == "step":
            toy.broken = {bad.sequence}
        else:
            toy.held = failing
        results = await asyncio.gather(worker.run(bad, 30), worker.run(good, 30), return_exceptions=True)
        assert isinstance(results[0], EngineFailedError) and results[1] is None
        assert good.token == toy.choice([3, 4])
        toy.broken, toy.held = set(), held
        await worker.run(again := Job(bad.sequence, [1, 2], Sampling()), 30)
        assert again.token == toy.choice([1, 2])

    with_worker(toy, scenario)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ("RuntimeError" if fails == "step" else "KeyError") in record.message and record.exc_info is None


def test_an_engine_that_cancels_its_step_stalls_no_other_job(caplog):
    class Cancelling(ToyEngine):
        async def step(self, requests):
            if not self.steps:
                self.steps.append([])
                raise asyncio.CancelledError
            return await super().step(requests)

    async def scenario(worker, loop) -> None:
        with pytest.raises(EngineFailedError):
            await worker.run(job(), 30)
        await worker.run(job(), 30)

    with_worker(Cancelling(), scenario)


class Stuck(ToyEngine):
    """Its steps never return, nor can they be cancelled, until ``free`` is set."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.free = asyncio.Event()

    async def step(self, requests):
        names = {request.sequence for request in requests}
        self._stepping |= names
        while not self.free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.free.wait()
        self._stepping -= names
        return await super().step(requests)


@pytest.mark.parametrize("kind", [{}, {"capabilities": ITSELF}], ids=["scheduled", "schedules itself"])
def test_a_job_expires_at_its_deadline_whatever_the_engine_does(kind):
    async def scenario(loop) -> None:
        stuck = Stuck(**kind)
        worker, began, sequence = Worker(stuck, Metrics(), clock=loop.time), loop.time(), new_sequence()

        async def expires(sequence: int, within: float, after: float = 0.0) -> None:
            with pytest.raises(ExpiredError):
                await worker.run(Job(sequence, [1, 2], Sampling()), within, after)
            assert loop.time() - began == pytest.approx(after + within, abs=0.1)

        await asyncio.gather(expires(sequence, 30), expires(new_sequence(), 5), expires(new_sequence(), 20, after=40))
        assert not len(worker)
        began = loop.time()
        await expires(sequence, 10)  # the same again, while the engine is still busy with the one before
        worker.release(sequence)
        again = asyncio.create_task(worker.run(job := Job(sequence, [1, 2], Sampling()), 10))
        await asyncio.sleep(1)
        stuck.free.set()
        await again
        assert job.token == stuck.choice([1, 2])
        await worker.close()

    run_virtually(scenario)


@pytest.mark.parametrize("capabilities", [Capabilities(), ITSELF])
def test_a_job_counts_the_time_of_its_steps_but_not_its_wait_for_a_budget(capabilities):
    async def scenario(worker, loop) -> None:
        began, waiting = loop.time(), job([1, 2, 3])
        await worker.run(waiting, 5, after=60.0)
        assert loop.time() - began == pytest.approx(60.0 + waiting.seconds, abs=0.01)
        assert waiting.seconds == pytest.approx(0.5 * waiting.steps, abs=0.01)

    with_worker(ToyEngine(capabilities=capabilities, delay_s=(0.5, 0.0)), scenario)


# -- steps wait for conversations that go on ------------------------------------------------------------

STEP_S = 0.5


async def decode(worker: Worker, tokens: int) -> None:
    text, sequence = [1, 2, 3], new_sequence()
    for _ in range(tokens):
        await worker.run(job := Job(sequence, text, Sampling()), 60)
        text.append(job.token)


@pytest.mark.parametrize(("turns", "parked", "together"), [(30, False, True), (30, True, False), (60, False, False)])
def test_a_step_waits_for_conversations_that_may_go_on_until_they_say_that_they_do_not(turns, parked, together):
    """The second conversation needs some turns of the event loop between two jobs."""
    engine = ToyEngine(delay_s=(STEP_S, 0.0))

    async def slowly(worker: Worker) -> None:
        text, sequence = [5, 2, 3], new_sequence()
        for _ in range(12):
            await worker.run(job := Job(sequence, text, Sampling()), 60)
            text.append(job.token)
            if parked:
                worker.parked(sequence)
            for _ in range(turns):
                await asyncio.sleep(0)

    async def scenario(worker, loop) -> None:
        await asyncio.gather(decode(worker, 12), slowly(worker))
        assert ([len(step) for step in engine.steps].count(2) >= 11) == together

    with_worker(engine, scenario)


# -- drafts that take more time than they spare -----------------------------------------------------------


class SlowGuess:
    """Offers a wrong token, which takes two milliseconds."""

    def newest(self) -> PricedDraft:
        began = time.thread_time()
        while time.thread_time() - began < 0.002:
            pass
        return PricedDraft([0], [0], [0.01])


@pytest.mark.parametrize(("conversations", "last"), [(4, 8), (1, 64)])
def test_several_conversations_stop_to_look_for_drafts_that_cost_more_than_they_spare(conversations, last):
    searched: list[bool] = []

    async def talk(worker: Worker, *, counts: bool) -> None:
        text, sequence = [1, 2, 3], new_sequence()
        for _ in range(192):
            source = SlowGuess() if worker.searches else None
            if counts:
                searched.append(source is not None)
            await worker.run(job := Job(sequence, text, Sampling(), source=source), 60)
            text.append(job.token)

    async def scenario(worker, loop) -> None:
        await asyncio.gather(*(talk(worker, counts=number == 0) for number in range(conversations)))

    with_worker(ToyEngine(delay_s=(0.1, 0.0)), scenario)
    assert all(searched[:16]) and sum(searched[-64:]) == last
