"""The conversations a verifier holds. They outlive connections; their caches come and go in the engine."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping

from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import ServerSession
from moa_server.auth import Authenticator, Bearer
from moa_server.background_answers import BackgroundAnswers
from moa_server.drafting.server_drafting import ServerDrafting
from moa_server.engine.base import Engine, new_sequence
from moa_server.scheduling.worker import Worker
from moa_server.settings import Settings


class OlderConnectionError(Exception):
    """A Hello arrived after one of a newer connection of the same conversation."""


class Conversation:
    """A session, the engine's sequence for it, and the connection that speaks for it.

    Attributes:
        number: counts the store's conversations, from 1; for people.
        token: resume token; knowing it proves ownership of the conversation.
        bearer: of its newest connection; the conversation belongs to its name, and is forgotten with its token.
        sequence: the engine's number of it.
        lock: held from taking a frame to its verdict.
        taken_over: set when another connection took over, a new event for each connection; None while
            there is no connection.
        connections: number of connections so far.
        last_used: clock reading in seconds.
        unwatch: ends the watch of the bearer's token.
    """

    def __init__(self, number: int, token: str, bearer: Bearer, session: ServerSession, sequence: int) -> None:
        self.number, self.token, self.bearer, self.session, self.sequence = number, token, bearer, session, sequence
        self.lock = asyncio.Lock()
        self.taken_over: asyncio.Event | None = None
        self.connections = 0
        self.last_used = 0.0
        self.unwatch: Callable[[], None] = lambda: None


class SessionStore:
    """Conversations by resume token. All methods belong to the event loop's thread.

    Args:
        clock: seconds, monotonic.

    Attributes:
        background_answers: continues the answers of conversations without a connection.
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        settings: Settings,
        background_answers: BackgroundAnswers,
        authenticator: Authenticator,
        clock: Callable[[], float] = time.monotonic,
        drafts: ServerDrafting | None = None,
    ) -> None:
        self._engine, self._worker, self._settings, self._clock = engine, worker, settings, clock
        self.background_answers, self._authenticator, self._drafts = background_answers, authenticator, drafts
        self.limits: Limits = settings.limits(engine.max_context, engine.capabilities)
        self._conversations: dict[str, Conversation] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def connected(self) -> int:
        """Conversations that have a connection."""
        return sum(conversation.taken_over is not None for conversation in self._conversations.values())

    def asks(self, conversation: Conversation) -> bool:
        """Whether its client is to be asked to draft, if it can: see :func:`asked_to_draft`."""
        others = [c for c in self._conversations.values() if c.taken_over is not None and c.session.runs]
        if len(others) <= self._settings.ask_from or not conversation.session.client_takes_rows:
            return False
        able = {
            c.number: c.session.round_trip_us for c in others if c.session.client_takes_rows and c.session.round_trip_us
        }
        return conversation.number in asked_to_draft(able, len(others), self._settings.ask_from)

    def attach(
        self, resume_token: str, bearer: Bearer, connection: int = 1
    ) -> tuple[Conversation, asyncio.Event] | None:
        """Connect to the conversation of a token, or to a new one if the token is empty, unknown or another owner's.

        The event of the previous connection is set. When the store is full, the conversation
        without a connection for the longest time is removed.

        Args:
            connection: the number of this connection within its conversation, as the client counts.

        Returns:
            the conversation and the event that ends this connection's claim; None when every
            conversation held has a connection.

        Raises:
            OlderConnectionError: the conversation has a newer one.
        """
        conversation = self._conversations.get(resume_token)
        if conversation is None or conversation.bearer.name != bearer.name:
            if len(self) >= self._settings.max_sessions and not self._make_room():
                return None
            # Guessing a token is hopeless, so knowing it is the only proof of ownership there is.
            token = secrets.token_urlsafe(24)
            session = ServerSession(self.limits, self._engine.vocab_size, self._engine.stop_tokens)
            conversation = Conversation(next(self._numbers), token, bearer, session, new_sequence())
            self._conversations[token] = conversation
        self.background_answers.end(conversation)
        if conversation.taken_over is not None:
            if connection < conversation.session.connection:
                raise OlderConnectionError
            conversation.taken_over.set()
        conversation.session.connection = max(conversation.session.connection, connection)
        claim = conversation.taken_over = asyncio.Event()
        conversation.connections += 1
        conversation.last_used = self._clock()
        conversation.unwatch()
        conversation.bearer = bearer
        conversation.unwatch = self._authenticator.watch(bearer, lambda: self._withdrawn(conversation))
        return conversation, claim

    def detach(self, conversation: Conversation, claim: asyncio.Event) -> None:
        """Handle the end of a connection: keep the conversation for a while and continue its answer if allowed, or
        forget it if its bearer's token was withdrawn."""
        if conversation.taken_over is claim:
            conversation.taken_over = None
            conversation.last_used = self._clock()
            if self._authenticator.valid(conversation.bearer):
                self.background_answers.begin(conversation)
            else:
                self._forget(conversation)

    def sweep(self) -> None:
        """Forget conversations that have been without a connection for too long."""
        now = self._clock()
        for conversation in [c for c in self._conversations.values() if c.taken_over is None]:
            if now - conversation.last_used >= self._settings.keep_seconds:
                self._forget(conversation)

    def _make_room(self) -> bool:
        abandoned = [c for c in self._conversations.values() if c.taken_over is None]
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
        self.background_answers.end(conversation)
        self._worker.release(conversation.sequence)
        if self._drafts is not None:
            self._drafts.release(conversation.sequence)


def asked_to_draft(trips: Mapping[int, float], answers: int, ask_from: int) -> list[int]:
    """Choose the clients that are asked to draft: as many as there are answers beyond ``ask_from``, those with the
    shortest round trips.

    Args:
        trips: round trip of each answer whose client can draft, by the answer's number.
        answers: number of answers written at once, including those of clients that cannot draft.
    """
    return sorted(trips, key=trips.__getitem__)[: max(0, answers - ask_from)]
