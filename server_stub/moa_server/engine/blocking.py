"""An engine for callers without an event loop: benchmarks, comparisons, tests."""

from __future__ import annotations

import asyncio

from moa_server.engine.base import Engine
from moa_server.scheduling.verify_job import Job

#: Most tokens of a prompt in one step; bounds the memory that they take.
CHUNK = 512


class BlockingEngine:
    """Runs jobs one after the other, each as fast as the engine can. An engine may have several of these."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()

    def run(self, job: Job) -> Job:
        """Do a job, and return it; what the engine raises is raised here."""
        while not job.done:
            request = job.request(self.engine.held(job.sequence, job.prefix), CHUNK + job.draft_length)
            [outcome] = self._loop.run_until_complete(self.engine.step([request]))
            job.take(request, outcome)
        return job

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        self.engine.release(sequence)

    def close(self) -> None:
        """End the event loop; the engine stays."""
        self._loop.close()
