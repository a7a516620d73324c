"""Which conversations and caches a store keeps, with a clock of the test's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from moa_runtime.session.events import Sampling
from moa_server.app import Verifier
from moa_server.auth import Bearer
from moa_server.engine.base import StepRequest
from moa_server.scheduling.draft_choice import DraftWorth
from moa_server.scheduling.step_drafts import Calibrations
from moa_server.sessions import Conversation, SessionStore
from moa_server.settings import Settings
from support.toy_engine import ToyEngine


class Held:
    """A store whose clock reads ``now``."""

    def __init__(self, **settings) -> None:
        self.now = 0.0
        self.engine = ToyEngine()
        self.store = Verifier(self.engine, Settings(**settings), clock=lambda: self.now).store

    def attach(self, token: str = "", owner: str = "") -> Conversation | None:
        attached = self.store.attach(token, Bearer(owner))
        return attached and attached[0]

    def detach(self, conversation: Conversation) -> None:
        self.store.detach(conversation, conversation.taken_over)


def test_a_token_finds_the_conversation_of_its_bearer():
    held = Held()
    one, two = held.attach(owner="alice"), held.attach()
    assert one.token != two.token and len(held.store) == 2
    held.detach(one)
    assert held.attach(one.token, "bob") is not one
    assert held.attach(one.token, "alice") is one
    assert held.attach("other") not in (one, two)
    assert held.store.connected == 4


def test_an_older_connection_cannot_detach_a_newer_one():
    held = Held()
    conversation, first = held.store.attach("", Bearer())
    _, second = held.store.attach(conversation.token, Bearer())
    assert first.is_set() and not second.is_set()
    held.store.detach(conversation, first)
    assert conversation.taken_over is second


def test_a_full_store_drops_the_conversation_that_was_left_longest_ago():
    held = Held(max_sessions=2)
    one, two = held.attach(), held.attach()
    assert held.attach() is None
    held.detach(two)
    held.now = 1.0
    held.detach(one)
    assert held.attach() is not None
    assert held.attach(one.token) is one
    assert held.attach(two.token) is None


def test_a_bearer_with_many_conversations_loses_its_own():
    held = Held(max_sessions=4)
    honest = held.attach(owner="alice")
    held.detach(honest)
    for second in range(20):
        held.now = float(second)
        held.detach(held.attach(owner="bob"))
    assert held.attach(honest.token, "alice") is honest


def test_a_conversation_is_forgotten_with_its_cache():
    held = Held(keep_seconds=100)
    left, connected = held.attach(), held.attach()
    for conversation in (left, connected):
        asyncio.run(held.engine.step([StepRequest(conversation.sequence, [1, 2], sampling=Sampling())]))
    held.detach(left)
    held.now = 99.0
    held.store.sweep()
    assert held.engine.sequences_open == 2 and held.attach(left.token) is left
    held.detach(left)
    held.now = 199.0
    held.store.sweep()
    assert held.engine.sequences_open == 1
    assert held.attach(left.token) is not left and held.attach(connected.token) is connected


def test_in_a_crowd_rows_are_made_for_drafts_that_bring_more_and_as_trials():
    cost = SimpleNamespace(memory_seconds=lambda rows: 2e-4 * rows)
    now, worker = [0.0], SimpleNamespace(serving=8, prices=(300.0, 0.4), memory_row_s=2e-4, cost=cost)
    store = SessionStore(SimpleNamespace(settings=Settings(), worker=worker, clock=lambda: now[0]))  # type: ignore[arg-type]

    def new() -> Conversation:
        session = SimpleNamespace(committed=[1] * 40, runs=True, pushes=True, makes_rows=True, rows_lacking=1)
        return Conversation(1, "", Bearer(), session, 1, Calibrations(), None, DraftWorth(store._worth))  # type: ignore[arg-type]

    useful, useless = new(), new()
    now[0] += 60.0
    for _ in range(200):
        useful.worth.add([0.9, 0.86, 0.81], [0.9])
        useless.worth.add([0.6], [0.6])
    assert store.rows_pay(useful) and useful.may_draft
    assert store.rows_pay(useless), "as a trial, of 64 tokens"
    useless.session.committed += [1] * 65
    assert not store.rows_pay(useless) and not store.rows_pay(useless)
    now[0] += 60.0
    assert store.rows_pay(useless)
    useless.session.committed += [1] * 65
    useless.session.pushes = False
    assert store.rows_pay(useless), "for a round"
    useless.session.runs = False
    assert not store.rows_pay(useless)
    worker.serving = 0
    assert store.rows_pay(useless), "between answers"
    useless.session.runs = useless.session.pushes = True
    worker.serving = 1
    assert not store.rows_pay(useless)
    slightly = new()
    for _ in range(200):
        slightly.worth.add([0.9, 0.7], [0.9])
    assert store.rows_pay(slightly), "alone, little is enough"
    worker.serving, worker.prices = 8, (300.0, 0.9)
    assert not store.rows_pay(slightly)
    assert not store.rows_pay(useful), "no drafted token is worth its price"
    worker.prices = (300.0, 0.4)
    assert store.rows_pay(useful)
    useful.session.rows_lacking = 2000
    assert not store.rows_pay(useful) and not useful.may_draft
    useless.session.makes_rows = False
    store.rows_pay(useless)
    assert not useless.may_draft, "what a client without a drafter does teaches nothing"
    for _ in range(2000):
        useless.worth.add([], [])
    assert not store.rows_pay(new()), "new conversations begin with what is known of all"
