"""Engine work of a session: jobs for its frames, verdicts from their results, and drafts of the server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from moa_runtime.session.handshake import fault
from moa_runtime.session.server import RowsWork, ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.drafting.server_drafting import Proposal
from moa_server.edge.rate_limits import Budgets, Kind
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, Job
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.app import Verifier
    from moa_server.sessions import Conversation


def busy(text: str, settings: Settings) -> wire.ServerMessage:
    """Build the fault of a verifier that is overloaded or full."""
    return fault(wire.FAULT_CODE_BUSY, text, retry_after_ms=settings.retry_after_ms)


class SessionWork:
    """Does the engine work of one connection, one piece after the other.

    Args:
        budgets: rate limits of the bearer; work over the limits is delayed.

    Attributes:
        track: of the timeline, for spans ``verify``, queueing included.
        verdicts, committed: number of verdicts, and of the tokens that they committed.
    """

    def __init__(self, verifier: Verifier, budgets: Budgets) -> None:
        self.track = ""
        self.verdicts = self.committed = 0
        self._verifier, self._budgets = verifier, budgets
        self._doing: asyncio.Future[wire.ServerMessage | None] | None = None

    def abandon(self) -> None:
        """Cancel the current piece: its result is no longer wanted."""
        if self._doing is not None:
            self._doing.cancel()

    async def do(self, conversation: Conversation, work: Verify | RowsWork) -> wire.ServerMessage | None:
        """Do one piece; return its verdict or fault, or None for memory rows and abandoned work.

        Raises:
            GivenUpError: the verifier is shutting down.
        """
        settings = self._verifier.settings
        doing = self._rows(conversation, work) if isinstance(work, RowsWork) else self._verdict(conversation, work)
        self._doing = asyncio.ensure_future(doing)
        try:
            await asyncio.wait({self._doing})
            return None if self._doing.cancelled() else self._doing.result()
        except ExpiredError:
            text = f"the verifier is too busy: no verdict within {settings.answer_seconds:g} seconds"
            return busy(text, settings)
        except EngineFailedError:
            text = "the verifier failed on this frame; sending it again may help"
            return fault(wire.FAULT_CODE_INTERNAL, text, retry_after_ms=settings.retry_after_ms)
        finally:
            self._doing.cancel()
            self._doing = None

    async def _rows(self, conversation: Conversation, work: RowsWork) -> None:
        job = job_of(work, conversation.sequence)
        await self._verifier.worker.run(job, self._verifier.settings.answer_seconds)
        take_rows(conversation.session, job)

    async def _verdict(self, conversation: Conversation, work: Verify) -> wire.ServerMessage:
        verifier, began, began_ns = self._verifier, time.monotonic(), time.time_ns()
        work, proposal = await self._drafted(conversation, work)
        job = job_of(work, conversation.sequence)
        used = {Kind.PREFILL_TOKENS: work.supplied, Kind.DRAFTED_TOKENS: len(work.draft)}
        charges = [(kind, amount) for kind, amount in used.items() if amount]
        owed_s = max((self._budgets.wait_s(kind, amount) for kind, amount in charges), default=0.0)
        try:
            await verifier.worker.run(job, verifier.settings.answer_seconds, owed_s)
        except BaseException:
            for kind, amount in charges:
                self._budgets.give_back(kind, amount)
            raise
        draft_s = 0.0 if proposal is None else proposal.seconds
        sharing = verifier.worker.serving
        verdict = verdict_of(conversation.session, work, job, job.seconds, draft_s, sharing)
        verdict.verdict.drafts_wanted = verifier.store.asks(conversation)
        if proposal is not None:
            self._learn(conversation, work, proposal, job, time.monotonic() - began, sharing)
        if verdict.verdict.finish:
            verifier.worker.rest(conversation.sequence)
        counts = {"drafted": len(work.draft), "accepted": verdict.verdict.accepted, "prefill": work.supplied}
        verifier.timeline.span("verify", began_ns, time.time_ns(), self.track, **counts, steps=job.steps)
        committed = len(verdict.verdict.tokens)
        verifier.metrics.decided(drafted=len(work.draft), accepted=verdict.verdict.accepted, committed=committed)
        self.verdicts += 1
        self.committed += committed
        return verdict

    async def _drafted(self, conversation: Conversation, work: Verify) -> tuple[Verify, Proposal | None]:
        """Add a draft of the server to pushed work, unless its bearer is over the rate limit."""
        drafts, sequence = self._verifier.drafts, conversation.sequence
        if drafts is None or not work.pushed or self._budgets.wait_s(Kind.DRAFTED_TOKENS, 0):
            return work, None
        start = drafts.rows_from(sequence, work.prefix)
        room = conversation.session.room
        with self._verifier.worker.coming():
            proposal = await drafts.propose(sequence, work.prefix, work.sampling, room=room)
        tree = proposal.tree
        return replace(work, draft=tree.tokens, parents=tree.parents, rows_from=start), proposal

    def _learn(
        self,
        conversation: Conversation,
        work: Verify,
        proposal: Proposal,
        job: Job,
        seconds: float,
        sharing: int,
    ) -> None:
        """Report the outcome to the server's drafter; ``seconds`` is the time of draft and verdict together."""
        drafts, sequence = self._verifier.drafts, conversation.sequence
        assert drafts is not None
        waited_s = max(0.0, seconds - proposal.seconds)
        drafts.observe(
            sequence,
            proposal,
            len(job.path),
            waited_s=waited_s,
            compute_s=job.seconds,
            sharing=sharing,
        )
        drafts.add_rows(sequence, [*work.prefix, *(work.draft[index] for index in job.path)], job.rows)


_MOST_US = (1 << 32) - 1


def job_of(work: Verify | RowsWork, sequence: int) -> Job:
    """Make the job for a piece of session work."""
    if isinstance(work, RowsWork):
        return Job(sequence, work.prefix, None, rows_from=work.start)
    return Job(sequence, work.prefix, work.sampling, work.draft, work.parents, work.rows_from)


def verdict_of(
    session: ServerSession, work: Verify, job: Job, seconds: float, draft_s: float = 0.0, sharing: int = 0
) -> wire.ServerMessage:
    """Commit the target's choice and build the verdict; queue the memory rows that came with it.

    Args:
        job: of :func:`job_of`, done.
        seconds: time of the target, for the verdict.
        draft_s: time of the server's own draft, for the verdict.
        sharing: see :meth:`moa_runtime.session.server.ServerSession.decide`.
    """
    assert job.token is not None
    compute_us, draft_us = (min(int(1e6 * each), _MOST_US) for each in (seconds, draft_s))
    verdict = session.decide(work, job.path, job.token, compute_us, draft_us, sharing)
    if work.rows_from is not None:
        take_rows(session, job)
    return verdict


def take_rows(session: ServerSession, job: Job) -> None:
    """Give a session its job's memory rows; disable rows if the engine made none."""
    rows = job.rows
    if rows is None:
        session.disable_rows()
    else:
        session.add_rows(rows.start, rows.keys, rows.values)
