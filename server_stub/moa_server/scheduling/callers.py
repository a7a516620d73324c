"""Who waits for which job, and hears what became of it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import NamedTuple

from moa_server.scheduling.verify_job import EngineFailedError, Job

_log = logging.getLogger(__name__)


class _Caller(NamedTuple):
    """Its context names the session that a line in the log is about."""

    result: asyncio.Future[None]
    context: contextvars.Context


class Callers:
    """One for each job that waits or is being worked on. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._callers: dict[int, _Caller] = {}  # by the identity of the job

    def __len__(self) -> int:
        return len(self._callers)

    def add(self, job: Job) -> asyncio.Future[None]:
        """Whoever calls this waits for the job: for this future."""
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers[id(job)] = _Caller(result, contextvars.copy_context())
        return result

    def remove(self, job: Job) -> None:
        """Nobody waits any more."""
        result = self._callers.pop(id(job)).result
        if result.done() and not result.cancelled():
            result.exception()  # taken note of, also where the caller left at the same time

    def resolve(self, job: Job) -> None:
        """The job is done."""
        caller = self._callers.get(id(job))
        if caller is not None and not caller.result.done():
            caller.result.set_result(None)

    def fail(self, job: Job) -> None:
        """The engine failed on the job."""
        caller = self._callers.get(id(job))
        if caller is not None and not caller.result.done():
            caller.result.set_exception(EngineFailedError())

    def fail_all(self, error: Exception) -> None:
        """No job will be done."""
        for caller in self._callers.values():
            if not caller.result.done():
                caller.result.set_exception(error)

    def log_failure(self, job: Job, error: BaseException) -> None:
        """A line on a job on which the engine failed, in the name of its session."""
        caller = self._callers.get(id(job))  # None: it left meanwhile
        context = contextvars.Context() if caller is None else caller.context
        context.run(_log_failure, job, error)


def _log_failure(job: Job, error: BaseException) -> None:
    size = f"a draft of {job.draft_length} tokens behind {len(job.prefix)}"
    _log.error("the engine failed on %s: %s: %s", size, type(error).__name__, error)
    _log.debug("where it failed", exc_info=error)
