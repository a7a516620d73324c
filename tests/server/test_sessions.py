"""Which conversations and caches a store keeps, with a clock of the test's own."""

from __future__ import annotations

import asyncio

from moa_server.scheduler import Scheduler
from moa_server.sessions import Conversation, SessionStore
from moa_server.settings import Settings


class FakeSequence:
    closed = 0

    def close(self) -> None:
        self.closed += 1


class FakeEngine:
    vocab_size, stop_tokens, max_context = 8, (0,), 100

    def open(self) -> FakeSequence:
        return FakeSequence()


class Held:
    """A store whose clock reads ``now``."""

    def __init__(self, **settings) -> None:
        self.now = 0.0
        self.store = SessionStore(FakeEngine(), Scheduler(), Settings(**settings), lambda: self.now)

    def attach(self, token: str = "") -> Conversation | None:
        attached = self.store.attach(token)
        return attached and attached[0]

    def detach(self, conversation: Conversation) -> None:
        self.store.detach(conversation, conversation.taken_over)


def test_a_token_finds_its_conversation():
    held = Held()
    one, two = held.attach(), held.attach()
    assert one.token != two.token and len(held.store) == 2
    held.detach(one)
    assert held.attach(one.token) is one
    assert held.attach("other") not in (one, two)


def test_an_older_connection_cannot_detach_a_newer_one():
    held = Held()
    conversation, first = held.store.attach("")
    _, second = held.store.attach(conversation.token)
    assert first.is_set() and not second.is_set()
    held.store.detach(conversation, first)
    assert conversation.taken_over is second


def test_a_full_store_drops_what_was_left_longest():
    held = Held(max_sessions=2)
    one, two = held.attach(), held.attach()
    assert held.attach() is None
    held.detach(two)
    held.now = 1.0
    held.detach(one)
    assert held.attach() is not None
    assert held.attach(one.token) is one
    assert held.attach(two.token) is None


def test_the_cache_goes_first_then_the_conversation():
    async def scenario() -> None:
        held = Held(cache_seconds=10, keep_seconds=100)
        left, connected = held.attach(), held.attach()
        for conversation in (left, connected):
            await held.store.used(conversation)
        held.detach(left)
        held.now = 9.0
        await held.store.sweep()
        assert left.sequence.closed == 0
        held.now = 11.0
        await held.store.sweep()
        await held.store.sweep()
        assert left.sequence.closed == 1 and held.store.attach(left.token)[0] is left
        held.detach(left)
        held.now = 111.0
        await held.store.sweep()
        assert held.attach(left.token) is not left
        assert held.attach(connected.token) is connected and connected.sequence.closed == 0

    asyncio.run(scenario())


def test_under_pressure_the_least_recently_used_caches_are_freed():
    async def scenario() -> None:
        held = Held(max_cached_tokens=100)
        conversations = [held.attach() for _ in range(3)]
        for conversation in conversations:
            held.now += 1
            conversation.session.committed = [1] * 45
            await held.store.used(conversation)
        assert [c.sequence.closed for c in conversations] == [1, 0, 0]
        held.now += 1
        conversations[2].session.committed = [1] * 99
        await held.store.used(conversations[2])
        assert [c.sequence.closed for c in conversations] == [1, 1, 0]
        held.now += 1
        conversations[2].session.committed = [1] * 150  # one alone may have more
        await held.store.used(conversations[2])
        assert [c.sequence.closed for c in conversations] == [1, 1, 0]

    asyncio.run(scenario())


def test_engine_calls_run_one_at_a_time_in_order():
    async def scenario() -> None:
        scheduler, seen = Scheduler(), []
        await asyncio.gather(*(scheduler.run(lambda n=n: seen.append(n)) for n in range(20)))
        scheduler.close()
        assert seen == list(range(20))

    asyncio.run(scenario())
