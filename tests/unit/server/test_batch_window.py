"""Steps wait a little for jobs that are about to come."""

from __future__ import annotations

import asyncio

import pytest

from moa_runtime.session.events import Sampling
from moa_server.engine.base import new_sequence
from moa_server.metrics import Metrics
from moa_server.scheduling.verify_job import Job
from moa_server.scheduling.worker import BatchWindow, Worker
from support.toy_engine import ToyEngine
from support.virtual_loop import run_virtually

STEP_S = 0.5


class Counting(ToyEngine):
    """Counts the jobs of each step."""

    def __init__(self) -> None:
        super().__init__(delay_s=(STEP_S, 0.0))
        self.sizes: list[int] = []

    async def step(self, requests):
        self.sizes.append(len(requests))
        return await super().step(requests)


async def decode(worker: Worker, number: int, tokens: int, prepare_s: float) -> None:
    """So many tokens, each prepared for so long."""
    text, sequence = [number, 2, 3], new_sequence()
    for _ in range(tokens):
        with worker.coming():
            await asyncio.sleep(prepare_s)
        job = Job(sequence, text, Sampling())
        await worker.run(job, 60)
        text.append(job.token)


@pytest.mark.parametrize(("prepare_s", "together"), [(0.05, True), (0.4, False)])
def test_those_who_prepare_their_jobs_share_passes_where_that_takes_little_of_a_step(prepare_s, together):
    async def scenario(loop) -> None:
        engine = Counting()
        worker = Worker(engine, Metrics(), clock=loop.time)
        await asyncio.gather(*(decode(worker, number, 12, prepare_s * number) for number in (1, 2)))
        shared = engine.sizes.count(2)
        assert shared >= 10 if together else shared <= 2
        await worker.close()

    run_virtually(scenario)


def test_a_step_waits_for_a_quarter_of_a_step_at_most_and_not_for_those_who_never_come_in_time():
    async def scenario(loop) -> None:
        announced, done = BatchWindow(loop.time), asyncio.Event()

        async def prepare() -> None:
            with announced.coming():
                await done.wait()

        assert not await announced.wait(STEP_S)
        preparing = asyncio.create_task(prepare())
        await asyncio.sleep(0)
        began = loop.time()
        assert await announced.wait(STEP_S)
        assert loop.time() - began == pytest.approx(0.25 * STEP_S, abs=0.01)
        await asyncio.sleep(20 * STEP_S)
        done.set()
        await preparing
        done.clear()
        preparing = asyncio.create_task(prepare())
        await asyncio.sleep(0)
        began = loop.time()
        assert not await announced.wait(STEP_S) and loop.time() == began
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        assert not await announced.wait(100 * STEP_S)  # who leaves is not waited for

    run_virtually(scenario)
