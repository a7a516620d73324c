"""Background answers: continue the answers of disconnected clients in steps that no other job wants."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from moa_server.logging import log_unexpected
from moa_server.metrics import Metrics
from moa_server.scheduling.session_work import job_of
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, GivenUpError
from moa_server.scheduling.worker import Worker
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.sessions import Conversation

_log = logging.getLogger(__name__)


class BackgroundAnswers:
    """Continues each answer from the loss of its connection until it ends, its client reconnects, or it reaches a limit
    of :class:`~moa_server.settings.Settings` (seconds, tokens).
    """

    def __init__(self, worker: Worker, metrics: Metrics, settings: Settings) -> None:
        self._worker, self._metrics, self._settings = worker, metrics, settings
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by number of the conversation

    def __len__(self) -> int:
        """Number of answers that are continued."""
        return len(self._tasks)

    def begin(self, conversation: Conversation) -> None:
        """Continue an answer whose connection is gone, if its Prompt allows that."""
        if self._settings.away_seconds > 0 and conversation.session.continues_without_client:
            task = asyncio.create_task(self._write(conversation))
            self._tasks[conversation.number] = task
            task.add_done_callback(lambda done: self._ended(conversation, done))

    def end(self, conversation: Conversation) -> None:
        """Stop: the client is back, or its conversation is removed."""
        task = self._tasks.get(conversation.number)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _write(self, conversation: Conversation) -> None:
        loop, written = asyncio.get_running_loop(), 0
        ends = loop.time() + self._settings.away_seconds
        try:
            while written < self._settings.away_tokens and (left := ends - loop.time()) > 0:
                async with conversation.lock:
                    work = conversation.session.next_background_work()
                    if work is None:
                        return
                    job = job_of(work, conversation.sequence)
                    await self._worker.run(job, left, background=True)
                    assert job.token is not None
                    conversation.session.decide(work, job.path, job.token, sent=False)
                written += 1
                self._metrics.decided(drafted=0, accepted=0, committed=1)
        except (EngineFailedError, ExpiredError, GivenUpError):
            return
        finally:
            self._worker.rest(conversation.sequence)
            _log.info("the answer of session %d went on without its client: %d tokens", conversation.number, written)

    def _ended(self, conversation: Conversation, task: asyncio.Task[None]) -> None:
        if self._tasks.get(conversation.number) is task:
            del self._tasks[conversation.number]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_unexpected(_log, "a background answer", error)
