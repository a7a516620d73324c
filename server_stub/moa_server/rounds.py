"""One round at the verifier: the target runs over a draft, the session decides, the rows go along."""

from __future__ import annotations

import time

from moa_runtime.session.rows import encode_rows
from moa_runtime.session.server import ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine import TargetSequence


def verify_round(
    session: ServerSession, sequence: TargetSequence, work: Verify, row_encoding: int
) -> wire.ServerMessage:
    """Do the work a session asked for.

    Args:
        row_encoding: a ``RowEncoding`` of the wire; unspecified for no memory rows.

    Returns:
        the verdict, with the memory rows of what was committed.
    """
    began = time.perf_counter()
    choices = sequence.verify(work.prefix, work.draft, work.parents, work.sampling)
    decision = session.decide(work, choices)
    sequence.keep(decision.path)
    verdict = decision.verdict
    if row_encoding != wire.ROW_ENCODING_UNSPECIFIED and len(decision.rows):
        keys, values = sequence.rows(decision.rows)
        verdict.rows.CopyFrom(encode_rows(decision.rows.start, keys, values, row_encoding))
    verdict.compute_us = min(int(1e6 * (time.perf_counter() - began)), (1 << 32) - 1)
    return wire.ServerMessage(verdict=verdict)
