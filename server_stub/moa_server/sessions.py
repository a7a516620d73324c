"""The conversations a verifier holds. They outlive connections, and their caches come and go."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator

from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import ServerSession
from moa_server.engine import Engine, TargetSequence
from moa_server.scheduler import Scheduler
from moa_server.settings import Settings


class Conversation:
    """A session, the target's state for it, and the connection that speaks for it.

    Attributes:
        number: counts the store's conversations, from 1; for people.
        token: resume token; who knows it owns the conversation.
        lock: held from taking a frame to the end of its engine call.
        taken_over: set when another connection took over, a new event for each connection; None while
            there is no connection.
        connections: how many there have been.
        last_used: clock reading, seconds.
        cached: whether the sequence holds a cache.
    """

    def __init__(self, number: int, token: str, session: ServerSession, sequence: TargetSequence) -> None:
        self.number, self.token, self.session, self.sequence = number, token, session, sequence
        self.lock = asyncio.Lock()
        self.taken_over: asyncio.Event | None = None
        self.connections = 0
        self.last_used = 0.0
        self.cached = False


class SessionStore:
    """Conversations by resume token. All methods belong to the event loop's thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._scheduler, self._settings, self._clock = engine, scheduler, settings, clock
        self.limits: Limits = settings.limits(engine.max_context)
        self._conversations: dict[str, Conversation] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._conversations)

    def attach(self, resume_token: str) -> tuple[Conversation, asyncio.Event] | None:
        """Connect to the conversation of a token, or to a new one where the token is empty or forgotten.

        The connection that had it before is told by its event. When the store is full, the conversation
        that has been without a connection for longest makes room.

        Returns:
            the conversation and the event that ends this connection's claim; None when every
            conversation held has a connection.
        """
        conversation = self._conversations.get(resume_token)
        if conversation is None:
            if len(self) >= self._settings.max_sessions and not self._make_room():
                return None
            # Guessing a token is hopeless, so knowing it is the only proof of ownership there is.
            token = secrets.token_urlsafe(24)
            session = ServerSession(self.limits, self._engine.vocab_size, self._engine.stop_tokens)
            conversation = Conversation(next(self._numbers), token, session, self._engine.open())
            self._conversations[token] = conversation
        if conversation.taken_over is not None:
            conversation.taken_over.set()
        claim = conversation.taken_over = asyncio.Event()
        conversation.connections += 1
        conversation.last_used = self._clock()
        return conversation, claim

    def detach(self, conversation: Conversation, claim: asyncio.Event) -> None:
        """A connection ended; the conversation stays for a while."""
        if conversation.taken_over is claim:
            conversation.taken_over = None
            conversation.last_used = self._clock()

    async def used(self, conversation: Conversation) -> None:
        """Note that the conversation's cache was filled; free others where all hold too many tokens."""
        conversation.last_used = self._clock()
        conversation.cached = True
        over = sum(len(c.session.committed) for c in self._cached()) - self._settings.max_cached_tokens
        for other in sorted(self._cached(), key=lambda c: c.last_used):
            if over <= 0 or other is conversation:
                break
            over -= len(other.session.committed)
            await self._free(other)

    async def sweep(self) -> None:
        """Free caches and forget conversations that have been without a connection for too long."""
        now = self._clock()
        for conversation in [c for c in self._conversations.values() if c.taken_over is None]:
            if now - conversation.last_used >= self._settings.keep_seconds:
                self._conversations.pop(conversation.token, None)
                await self._free(conversation)
            elif conversation.cached and now - conversation.last_used >= self._settings.cache_seconds:
                await self._free(conversation)

    def _cached(self) -> Iterator[Conversation]:
        return (c for c in self._conversations.values() if c.cached)

    async def _free(self, conversation: Conversation) -> None:
        conversation.cached = False
        # In the worker, so never in the middle of an engine call; the next one fills the cache again.
        await self._scheduler.run(conversation.sequence.close)

    def _make_room(self) -> bool:
        abandoned = [c for c in self._conversations.values() if c.taken_over is None]
        if not abandoned:
            return False
        # Dropping the last reference frees the cache.
        del self._conversations[min(abandoned, key=lambda c: c.last_used).token]
        return True
