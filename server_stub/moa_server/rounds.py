"""One round at the verifier: the target runs over a draft, the session decides, the rows go along."""

from __future__ import annotations

import time

from moa_runtime.session.rows import encode_rows
from moa_runtime.session.server import ServerSession, Verify
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine import TargetSequence


def verify_round(
    session: ServerSession,
    sequence: TargetSequence,
    work: Verify,
    row_encoding: int,
    timeline: Timeline = NO_TIMELINE,
    track: str = "verifier",
) -> wire.ServerMessage:
    """Do the work a session asked for.

    Args:
        row_encoding: a ``RowEncoding`` of the wire; unspecified for no memory rows.
        timeline: gets the spans ``verify``, with the tokens drafted, accepted and prefilled, and ``rows``.

    Returns:
        the verdict, with the memory rows of what was committed.
    """
    began, began_ns = time.perf_counter(), time.time_ns()
    choices = sequence.verify(work.prefix, work.draft, work.parents, work.sampling)
    decision = session.decide(work, choices)
    sequence.keep(decision.path)
    counts = {"drafted": len(work.draft), "accepted": len(decision.path), "prefill": work.supplied}
    timeline.span("verify", began_ns, time.time_ns(), track, **counts)
    verdict = decision.verdict
    if row_encoding != wire.ROW_ENCODING_UNSPECIFIED and len(decision.rows):
        with timeline.measure("rows", track, count=len(decision.rows)):
            rows = sequence.rows(decision.rows)
            if rows is not None:
                verdict.rows.CopyFrom(encode_rows(decision.rows.start, *rows, row_encoding))
    verdict.compute_us = min(int(1e6 * (time.perf_counter() - began)), (1 << 32) - 1)
    return wire.ServerMessage(verdict=verdict)
