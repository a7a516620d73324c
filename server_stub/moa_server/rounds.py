"""One round at the verifier: from the work that a session asks for to the verdict."""

from __future__ import annotations

from moa_runtime.session.rows import encode_rows
from moa_runtime.session.server import ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.jobs import Job


def job_of(work: Verify, sequence: int, row_encoding: int) -> Job:
    """The job that does the work on a sequence.

    Args:
        row_encoding: a ``RowEncoding`` of the wire; unspecified for no memory rows.
    """
    rows_from = None if row_encoding == wire.ROW_ENCODING_UNSPECIFIED else work.rows_from
    return Job(sequence, work.prefix, work.sampling, work.draft, work.parents, rows_from)


def verdict_of(session: ServerSession, work: Verify, job: Job, row_encoding: int, seconds: float) -> wire.ServerMessage:
    """Commit what the target chose, and say so, with the memory rows of what was committed.

    Args:
        job: of :func:`job_of`, done.
        seconds: that the target took, for the verdict.
    """
    assert job.token is not None
    compute_us = min(int(1e6 * seconds), (1 << 32) - 1)
    decision = session.decide(work, job.path, job.token, compute_us)
    if row_encoding != wire.ROW_ENCODING_UNSPECIFIED:
        rows = job.rows(decision.rows)
        if rows is not None:
            decision.verdict.rows.CopyFrom(encode_rows(rows.start, rows.keys, rows.values, row_encoding))
    return wire.ServerMessage(verdict=decision.verdict)
