"""From the work that a session asks for to what the engine made of it."""

from __future__ import annotations

from moa_runtime.session.server import RowsWork, ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.scheduling.verify_job import Job

_MOST_US = (1 << 32) - 1


def job_of(work: Verify | RowsWork, sequence: int) -> Job:
    """The job that does the work on a sequence."""
    if isinstance(work, RowsWork):
        return Job(sequence, work.prefix, None, rows_from=work.start)
    return Job(sequence, work.prefix, work.sampling, work.draft, work.parents, work.rows_from)


def verdict_of(
    session: ServerSession, work: Verify, job: Job, seconds: float, draft_s: float = 0.0, sharing: int = 0
) -> wire.ServerMessage:
    """Commit what the target chose, and say so; the memory rows that came with it follow.

    Args:
        job: of :func:`job_of`, done.
        seconds: that the target took, for the verdict.
        draft_s: that the server's own draft took, likewise.
        sharing: see :meth:`moa_runtime.session.server.ServerSession.decide`.
    """
    assert job.token is not None
    spent = (min(int(1e6 * each), _MOST_US) for each in (seconds, draft_s))
    verdict = session.decide(work, job.path, job.token, *spent, sharing)
    if work.rows_from is not None:
        take_rows(session, job)
    return verdict


def take_rows(session: ServerSession, job: Job) -> None:
    """Give a session the memory rows that a job asked for; an engine that made none makes none."""
    rows = job.rows
    if rows is None:
        session.disable_rows()
    else:
        session.add_rows(rows.start, rows.keys, rows.values)
