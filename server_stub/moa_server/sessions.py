"""The conversations of a verifier, their engine work, and the background answers of disconnected clients.

Conversations outlive connections; their caches come and go in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moa_runtime.session.handshake import fault
from moa_runtime.session.server import RowsWork, ServerSession, Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.auth import Bearer
from moa_server.edge.rate_limits import Budgets, Kind, TokenBucket
from moa_server.engine.base import new_sequence
from moa_server.logging import log_unexpected
from moa_server.scheduling.draft_choice import DraftWorth
from moa_server.scheduling.step_drafts import Calibration, Calibrations, StepDrafts, take_rows
from moa_server.scheduling.verify_job import EngineFailedError, ExpiredError, GivenUpError, Job
from moa_server.settings import Settings

if TYPE_CHECKING:
    from moa_server.app import Verifier

_log = logging.getLogger(__name__)

# Memory rows that may be sent again, for what a client has lost: two contexts at once, later one in this time.
_AGAIN_CONTEXTS, _AGAIN_SECONDS = 2, 60.0

#: Tokens for which a conversation gets memory rows as a trial, and over which the rows that it lacks are spread; share
#: of the time that trials may take.
_TRIAL_TOKENS, _TRIALS = 64, 0.005
#: Seconds that the frames of a memory row and of a draft take.
_FRAMES_S = 3e-4
#: Tokens that drafts have to add to a round among others. A device that drafts also tries rounds of its own, and its
#: session then misses steps of the others: without this, 8 sessions in float32 were slower by 14 %.
_LEAST_ADDED = 0.4


class OlderConnectionError(Exception):
    """A Hello arrived after one of a newer connection of the same conversation."""


@dataclass(eq=False)
class Conversation:
    """A session, the engine's sequence for it, and the connection that speaks for it."""

    number: int  # counts the store's conversations, from 1; for people
    token: str  # resume token; knowing it proves ownership of the conversation
    bearer: Bearer  # of its newest connection; the conversation belongs to its name, and is forgotten with its token
    session: ServerSession
    sequence: int  # the engine's number of it
    calibrations: Calibrations
    row_credit: TokenBucket  # one row for each token that was supplied or committed, and some to be sent again
    worth: DraftWorth  # of the client's unsolicited drafts
    may_draft: bool = False  # whether the client has the memory rows to draft with
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held from taking a frame to its verdict
    taken_over: asyncio.Event | None = None  # of its connection, None without one; set when another one took over
    connections: int = 0  # number of connections so far
    last_used: float = 0.0  # clock reading in seconds
    unwatch: Callable[[], object] = lambda: None  # ends the watch of the bearer's token


class SessionStore:
    """Conversations by resume token. All methods belong to the event loop's thread."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._settings = verifier, verifier.settings
        self._conversations: dict[str, Conversation] = {}
        self._numbers = itertools.count(1)
        self._copies, self._model, self._worth = Calibration(), Calibration(), DraftWorth()
        self._trying: tuple[Conversation, int] | None = None  # gets memory rows up to a number of committed tokens
        self._tried_at = verifier.clock()

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def connected(self) -> int:
        """Conversations that have a connection."""
        return sum(conversation.taken_over is not None for conversation in self._conversations.values())

    def rows_pay(self, conversation: Conversation) -> bool:
        """Return whether memory rows may be made for a conversation that did not ask for them with a draft. Also sets
        its ``may_draft``.

        Rows take time, and so do the frames of rows and drafts: that pays if the drafts bring more. One conversation at
        a time gets rows as a trial. Between answers rows are made while no conversation is served.
        """
        session, worker, length = conversation.session, self._verifier.worker, len(conversation.session.committed)
        (rate, price), row_s, lacking = worker.prices, worker.memory_row_s, session.rows_lacking
        conversation.may_draft = session.makes_rows and 2 * lacking < _TRIAL_TOKENS
        if not session.pushes and (session.runs or not worker.serving):
            return True
        added, least = conversation.worth.tokens(price), _LEAST_ADDED if worker.serving > 1 else 0.0
        if added >= least + rate * (row_s * (1 + added + lacking / _TRIAL_TOKENS) + _FRAMES_S):
            return True
        trying, until = self._trying or (conversation, 0)
        if trying is conversation and length <= until:
            return True
        trial_s = worker.cost.memory_seconds(lacking) + _TRIAL_TOKENS * (worker.cost.memory_seconds(1) + _FRAMES_S)
        if lacking and session.pushes and (now := self._verifier.clock()) - self._tried_at >= trial_s / _TRIALS:
            self._trying, self._tried_at = (conversation, length + _TRIAL_TOKENS), now
            return True
        return False

    def attach(
        self, resume_token: str, bearer: Bearer, connection: int = 1
    ) -> tuple[Conversation, asyncio.Event] | None:
        """Connect to the conversation of a token, or to a new one if the token is empty, unknown or another owner's.

        The event of the previous connection is set. If the store is full, a conversation without a connection is
        removed: of the bearer with the most of them, the one that was left longest ago.

        Args:
            connection: the number of this connection within its conversation, as the client counts.

        Returns:
            the conversation and the event that ends this connection's claim; None if every conversation held has a
            connection.

        Raises:
            OlderConnectionError: the conversation has a newer one.
        """
        verifier, conversation = self._verifier, self._conversations.get(resume_token)
        if conversation is None or conversation.bearer.name != bearer.name:
            if len(self) >= self._settings.max_sessions and not self._make_room():
                return None
            # Guessing a token is hopeless, so knowing it is the only proof of ownership there is.
            token, engine = secrets.token_urlsafe(24), verifier.engine
            limits = self._settings.limits(engine.max_context, engine.capabilities)
            session = ServerSession(limits, engine.vocab_size, engine.stop_tokens)
            calibrations = Calibrations(copies=self._copies, model=self._model)
            number, sequence, worth = next(self._numbers), new_sequence(), DraftWorth(self._worth)
            context = engine.max_context
            credit = TokenBucket(context / _AGAIN_SECONDS, _AGAIN_CONTEXTS * context, verifier.clock)
            conversation = Conversation(number, token, bearer, session, sequence, calibrations, credit, worth)
            engine.share(conversation.sequence, bearer.name)
            self._conversations[token] = conversation
        verifier.background_answers.end(conversation)
        if conversation.taken_over is not None:
            if connection < conversation.session.connection:
                raise OlderConnectionError
            conversation.taken_over.set()
        conversation.session.connection = max(conversation.session.connection, connection)
        claim = conversation.taken_over = asyncio.Event()
        conversation.connections += 1
        conversation.last_used = verifier.clock()
        conversation.unwatch()
        conversation.bearer = bearer
        conversation.unwatch = verifier.authenticator.watch(bearer, lambda: self._withdrawn(conversation))
        return conversation, claim

    def detach(self, conversation: Conversation, claim: asyncio.Event) -> None:
        """Handle the end of a connection: keep the conversation for a while and continue its answer if allowed, or
        forget it if its bearer's token was withdrawn."""
        if conversation.taken_over is claim:
            conversation.taken_over = None
            conversation.last_used = self._verifier.clock()
            if self._verifier.authenticator.valid(conversation.bearer):
                self._verifier.background_answers.begin(conversation)
            else:
                self._forget(conversation)

    def sweep(self) -> None:
        """Forget conversations that have been without a connection for too long."""
        oldest = self._verifier.clock() - self._settings.keep_seconds
        for conversation in self._abandoned():
            if conversation.last_used <= oldest:
                self._forget(conversation)

    def _abandoned(self) -> list[Conversation]:
        return [conversation for conversation in self._conversations.values() if conversation.taken_over is None]

    def _make_room(self) -> bool:
        abandoned = self._abandoned()
        if abandoned:  # of the bearer with the most: no client can push out the conversations of others
            counts = Counter(conversation.bearer.name for conversation in abandoned)
            self._forget(min(abandoned, key=lambda c: (-counts[c.bearer.name], c.last_used)))
        return bool(abandoned)

    def _withdrawn(self, conversation: Conversation) -> None:
        if conversation.taken_over is None:  # else it is forgotten when its connection has ended
            self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        del self._conversations[conversation.token]
        conversation.unwatch()
        self._verifier.background_answers.end(conversation)
        self._verifier.worker.release(conversation.sequence)
        if self._verifier.drafts is not None:
            self._verifier.drafts.release(conversation.sequence)


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
            return busy(f"the verifier is too busy: no verdict within {settings.answer_seconds:g} seconds", settings)
        except EngineFailedError:
            text = "the verifier failed on this frame; sending it again may help"
            return fault(wire.FAULT_CODE_INTERNAL, text, retry_after_ms=settings.retry_after_ms)
        finally:
            self._doing.cancel()
            self._doing = None

    async def _rows(self, conversation: Conversation, work: RowsWork) -> None:
        job = Job(conversation.sequence, work.prefix, None, rows_from=work.start)
        await self._verifier.worker.run(job, self._verifier.settings.answer_seconds)
        take_rows(conversation.session, job)
        if (drafts := self._verifier.drafts) is not None:
            drafts.rows_from(job.sequence, job.prefix)
            drafts.add_rows(job.sequence, job.prefix, job.rows)

    async def _verdict(self, conversation: Conversation, work: Verify) -> wire.ServerMessage:
        verifier, began_ns = self._verifier, time.time_ns()
        unasked = not work.pushed or (verifier.worker.searches and not self._budgets.wait_s(Kind.DRAFTED_TOKENS, 0))
        drafts = StepDrafts(conversation.session, conversation.sequence, conversation.calibrations, work)
        job = drafts.job(verifier.drafts, unasked=unasked)
        used = {Kind.PREFILL_TOKENS: work.supplied, Kind.DRAFTED_TOKENS: len(work.draft)}
        charges = [(kind, amount) for kind, amount in used.items() if amount]
        owed_s = max((self._budgets.wait_s(kind, amount) for kind, amount in charges), default=0.0)
        try:
            await verifier.worker.run(job, verifier.settings.answer_seconds, owed_s)
        except BaseException:
            for kind, amount in charges:
                self._budgets.give_back(kind, amount)
            raise
        message, drafted = drafts.verdict(job)
        if work.pushed and drafted:
            self._budgets.wait_s(Kind.DRAFTED_TOKENS, drafted)
        verdict = message.verdict
        if not work.supplied:
            verifier.metrics.acceptance.add(drafts.paths, job.verified, job.path)
        if work.pushed and conversation.may_draft:
            conversation.worth.add(drafts.paths, drafts.own_paths)
        if verdict.finish:
            verifier.worker.rest(conversation.sequence)
        accepted, committed = verdict.accepted, len(verdict.tokens)
        counts = {"drafted": drafted, "accepted": accepted, "prefill": work.supplied, "steps": job.steps}
        verifier.timeline.span("verify", began_ns, time.time_ns(), self.track, **counts)
        verifier.metrics.decided(drafted=drafted, accepted=accepted, committed=committed)
        conversation.row_credit.give_back(work.supplied + committed)
        self.verdicts += 1
        self.committed += committed
        return message


class BackgroundAnswers:
    """Continues each answer from the loss of its connection until it ends, its client reconnects, or it reaches a limit
    of :class:`~moa_server.settings.Settings` (seconds, tokens); in steps that no other job wants.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._settings = verifier, verifier.settings
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by number of the conversation

    def __len__(self) -> int:
        """Return the number of answers that are continued."""
        return len(self._tasks)

    def begin(self, conversation: Conversation) -> None:
        """Continue an answer whose connection is gone, if its Prompt allows that."""
        if self._settings.away_seconds > 0 and conversation.session.continues_without_client:
            task = asyncio.create_task(self._write(conversation))
            self._tasks[conversation.number] = task
            task.add_done_callback(lambda done: self._ended(conversation, done))

    def end(self, conversation: Conversation) -> None:
        """Stop: the client is back, or its conversation is removed."""
        if conversation.number in self._tasks:
            self._tasks[conversation.number].cancel()

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
                    job = Job(conversation.sequence, work.prefix, work.sampling)
                    await self._verifier.worker.run(job, left, background=True)
                    assert job.token is not None
                    conversation.session.decide(work, job.path, job.token, logprobs=job.logprobs, sent=False)
                written += 1
                self._verifier.metrics.decided(drafted=0, accepted=0, committed=1)
        except (EngineFailedError, ExpiredError, GivenUpError):
            return
        finally:
            self._verifier.worker.rest(conversation.sequence)
            _log.info("the answer of session %d continued without its client: %d tokens", conversation.number, written)

    def _ended(self, conversation: Conversation, task: asyncio.Task[None]) -> None:
        if self._tasks.get(conversation.number) is task:
            del self._tasks[conversation.number]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_unexpected(_log, "a background answer", error)
