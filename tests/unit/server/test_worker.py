"""Jobs on engines of several stopping_rule: what comes out, what is dropped, what fails."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from moa_runtime.session.events import Sampling
from moa_server.engine.base import Capabilities, new_sequence
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, Job
from moa_server.scheduling.worker import Worker
from support.toy_engine import STOP, VOCAB, ToyEngine, plain
from support.virtual_loop import run_virtually

CHAINS = Capabilities(trees=False, max_draft_tokens=8)
ITSELF = Capabilities(trees=False, max_draft_tokens=8, schedules_itself=True)
MANNERS = {
    "trees": {},
    "chains, preempting": {"capabilities": CHAINS, "preempts": 0.2},
    "schedules itself, preempting": {"capabilities": ITSELF, "preempts": 0.2},
}


@pytest.fixture(params=MANNERS.values(), ids=MANNERS.keys())
def toy(request) -> ToyEngine:
    return ToyEngine(**request.param)


async def answer(worker: Worker, engine: ToyEngine, prompt: list[int], count: int, rng: random.Random) -> list[int]:
    """Rounds of chains, each token right two times out of three."""
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
    return tokens


def test_many_answers_at_once_are_each_what_the_target_writes(toy):
    async def scenario() -> None:
        worker, rng = Worker(toy, Metrics()), random.Random(3)
        prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.choice([3, 40, 300]))] for _ in range(12)]
        await asyncio.gather(*(answer(worker, toy, prompt, 20, rng) for prompt in prompts))
        await worker.close()
        assert not len(worker) and not toy.sequences_open

    asyncio.run(scenario())


def test_a_job_that_is_dropped_is_gone_within_two_steps(toy):
    async def scenario() -> None:
        worker = Worker(toy, Metrics())
        sequence = new_sequence()
        running = asyncio.create_task(worker.run(Job(sequence, [1] * 900, Sampling()), 30))
        while not toy.steps:
            await asyncio.sleep(0)
        before = len(toy.steps)
        running.cancel()
        await worker.run(Job(new_sequence(), [2], Sampling()), 30)
        await worker.run(Job(new_sequence(), [2], Sampling()), 30)
        later = [request.sequence for step in toy.steps[before + 1 :] for request in step]
        assert running.cancelled() and sequence not in later
        await worker.close()

    asyncio.run(scenario())


def test_a_job_that_cannot_be_done_harms_no_other(toy, caplog):
    async def scenario() -> None:
        worker = Worker(toy, Metrics())
        bad, good = Job(new_sequence(), [1, 2], Sampling()), Job(new_sequence(), [3, 4], Sampling())
        toy.broken = {bad.sequence}
        results = await asyncio.gather(worker.run(bad, 30), worker.run(good, 30), return_exceptions=True)
        assert isinstance(results[0], EngineFailedError) and results[1] is None
        assert good.token == toy.choice([3, 4])
        toy.broken = set()
        await worker.run(again := Job(bad.sequence, [1, 2], Sampling()), 30)
        assert again.token == toy.choice([1, 2])
        await worker.close()

    asyncio.run(scenario())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the engine failed on a draft of 0 tokens after 2: RuntimeError: the toy is broken"
    ]
    assert all(record.exc_info is None for record in caplog.records if record.levelname != "DEBUG")


def test_a_job_expires(toy):
    async def scenario() -> None:
        worker = Worker(toy, Metrics())
        with pytest.raises(ExpiredError):
            await worker.run(Job(new_sequence(), [1] * 900, Sampling()), 0)
        await worker.close()

    asyncio.run(scenario())


def test_a_sequence_is_not_released_in_the_middle_of_its_step():
    async def scenario() -> None:
        toy = ToyEngine(delay_s=(0.01, 0))  # which asserts it
        worker, sequence = Worker(toy, Metrics()), new_sequence()
        running = asyncio.create_task(worker.run(Job(sequence, [1], Sampling()), 30))
        while not toy.steps:
            await asyncio.sleep(0)
        worker.release(sequence)
        await running
        await worker.run(Job(new_sequence(), [1], Sampling()), 30)
        assert toy.sequences_open == 1
        await worker.close()

    asyncio.run(scenario())


def test_jobs_of_several_sequences_share_steps():
    async def scenario() -> None:
        toy = ToyEngine(delay_s=(0.005, 0))
        worker = Worker(toy, Metrics())
        jobs = [Job(new_sequence(), [1, n], Sampling()) for n in range(1, 9)]
        await asyncio.gather(*(worker.run(job, 30) for job in jobs))
        assert len(toy.steps) <= 3
        await worker.close()

    asyncio.run(scenario())


def test_the_toy_ends_turns():
    toy = ToyEngine(stops=[9])
    assert plain(toy, [1] * 5, 50)[-1] == STOP


def test_an_engine_that_cancels_its_step_stalls_nobody(caplog):
    class Cancelling(ToyEngine):
        async def step(self, requests):
            if not self.steps:
                self.steps.append([])
                raise asyncio.CancelledError
            return await super().step(requests)

    async def scenario() -> None:
        worker = Worker(Cancelling(), Metrics())
        with pytest.raises(EngineFailedError):
            await worker.run(Job(new_sequence(), [1], Sampling()), 30)
        await worker.run(Job(new_sequence(), [1], Sampling()), 30)
        await worker.close()

    asyncio.run(scenario())


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


@pytest.mark.parametrize("manner", [{}, {"capabilities": ITSELF}], ids=["scheduled", "schedules itself"])
def test_a_job_expires_at_its_deadline_whatever_the_engine_does(manner):
    async def scenario(loop) -> None:
        stuck = Stuck(**manner)
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


def test_time_waited_for_a_budget_does_not_count():
    async def scenario(loop) -> None:
        toy = ToyEngine()
        worker = Worker(toy, Metrics(), clock=loop.time)
        await worker.run(job := Job(new_sequence(), [1], Sampling()), 1, after=60)
        assert job.done
        await worker.close()

    run_virtually(scenario)


@pytest.mark.parametrize("capabilities", [Capabilities(), ITSELF])
def test_a_job_knows_how_long_its_steps_took_but_not_how_long_it_waited(capabilities):
    async def scenario(loop) -> None:
        worker = Worker(ToyEngine(capabilities=capabilities, delay_s=(0.5, 0.0)), Metrics(), clock=loop.time)
        job = Job(new_sequence(), [1, 2, 3], Sampling())
        began = loop.time()
        await worker.run(job, 30, 10.0)
        assert loop.time() - began == pytest.approx(10.0 + job.seconds, abs=0.01) and job.seconds == pytest.approx(
            0.5 * job.steps, abs=0.01
        )
        await worker.close()

    run_virtually(scenario)


def test_what_an_engine_cannot_say_of_one_sequence_harms_no_other(toy, caplog):
    held = toy.held
    bad, good = Job(new_sequence(), [1, 2], Sampling()), Job(new_sequence(), [3, 4], Sampling())

    def failing(sequence, prefix):
        if sequence == bad.sequence:
            raise KeyError("lost")
        return held(sequence, prefix)

    async def scenario() -> None:
        toy.held = failing
        worker = Worker(toy, Metrics())
        results = await asyncio.gather(worker.run(bad, 30), worker.run(good, 30), return_exceptions=True)
        assert isinstance(results[0], EngineFailedError) and results[1] is None
        assert good.token == toy.choice([3, 4])
        toy.held = held
        await worker.run(again := Job(bad.sequence, [1, 2], Sampling()), 30)
        assert again.token == toy.choice([1, 2])
        await worker.close()

    asyncio.run(scenario())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "the engine failed on a draft of 0 tokens after 2: KeyError: 'lost'"
    ]
