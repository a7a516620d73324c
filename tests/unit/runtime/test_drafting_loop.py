"""Shadow drafts and outcomes of the drafting loop."""

from __future__ import annotations

import numpy as np
import pytest

from moa_runtime.drafters.base import GREEDY, Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import Draft, Pushed, RoundEnded, Wait
from moa_runtime.drafting.in_flight import ShadowDraft
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Cause, Decided, Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.session.server import RowsWork, ServerSession, Verify, parse_client_message
from moa_runtime.session.tree import DraftTree
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.toy_engine import PRINTS, VOCAB

PROMPT = list(range(1, 41))


class RowsDrafter:
    """Proposes nothing, and counts its memory rows. Implements :class:`moa_runtime.drafters.base.Drafter`."""

    rows, needs_rows, stopping_rule = 0, True, None

    def add_rows(self, start, keys, values) -> None:
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def propose(self, prefix, budget, sampling=GREEDY) -> DraftTree:
        return DraftTree()


class Ends:
    """Both ends of a connection without delay; the server pushes verdicts and rows when told."""

    def __init__(self) -> None:
        self.now, self.drafter = 0.0, RowsDrafter()
        self.loop = DraftingLoop(ClientSession(PRINTS, stop_tokens=()), self.drafter, FixedShape(Budget.chain(3)))
        self.server = ServerSession(Limits(), VOCAB, ())
        self.loop.opened()
        [hello] = self.loop.frames_to_send(self.now)
        greeted = parse_client_message(hello).hello
        for said in self.server.greet(greeted, "token", capabilities=[wire.CAPABILITY_DRAFTS]):
            self.say(said)
        self.loop.ask(0, PROMPT, Sampling(), 400)
        self.loop.next(self.now)
        for frame in self.loop.frames_to_send(self.now):
            message = parse_client_message(frame)
            work = self.server.receive(message)
            if isinstance(work, Verify):
                verdict = self.server.decide(work, (), 7)
                verdict.verdict.echo.CopyFrom(wire.Echo(stamp=message.prompt.stamp, held_us=0))
                self.say(verdict)

    def say(self, message: wire.ServerMessage) -> None:
        self.loop.received(message.SerializeToString(), self.now)

    def push(self) -> None:
        """Push a verdict of one token, a second later."""
        work = self.server.next_work()
        while isinstance(work, RowsWork):
            rows = np.ones((len(work.prefix) - work.start, 1, 1), np.float32)
            self.server.add_rows(work.start, rows, rows)
            work = self.server.next_work()
        assert isinstance(work, Verify)
        self.now += 1.0
        self.say(self.server.decide(work, (), 7))

    def send_rows(self) -> None:
        rows = self.server.take_rows()
        assert rows is not None
        self.say(rows)


def test_a_shadow_draft_follows_the_newest_memory_row():
    ends = Ends()
    for _ in range(30):
        ends.push()
    while ends.drafter.rows < len(PROMPT) - 1:
        assert not isinstance(ends.loop.next(ends.now), Draft)
        ends.send_rows()
    todo = ends.loop.next(ends.now)
    assert isinstance(todo, Draft)
    assert todo.prefix == ends.loop.committed[: ends.drafter.rows + 1] and len(todo.prefix) < len(ends.loop.committed)
    ends.loop.drafted(todo, DraftTree(), 0.1, ends.now)
    assert not isinstance(ends.loop.next(ends.now), Draft)
    ends.push()  # which decides it
    assert not isinstance(ends.loop.next(ends.now), Draft)  # there was one for this position
    ends.send_rows()
    later = ends.loop.next(ends.now)
    assert isinstance(later, Draft) and len(later.prefix) > len(todo.prefix)
    assert later.prefix == ends.loop.committed[: ends.drafter.rows + 1]


class Recorder:
    """Keeps its outcomes. Implements :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    token_s = 0.0

    def __init__(self) -> None:
        self.outcomes: list[RoundEnded | Pushed] = []

    def budget(self) -> Budget:
        return Budget.chain(6)

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self.outcomes.append(outcome)


@pytest.mark.parametrize("cause", [Cause.ASKED, Cause.PUSHED])
def test_each_outcome_has_the_number_of_sessions_that_share_the_target(cause: Cause) -> None:
    controller = Recorder()
    session = ClientSession(PRINTS, stop_tokens=())
    session.committed = [9]
    loop = DraftingLoop(session, None, controller)
    loop._shadow.begin(0, DraftTree((5,), (0,), (-0.1,), (1,)), 0.1)
    told = loop._record_outcome(Decided(cause, 0, 2, 1, 0.01, sharing=8), 0.1)
    assert controller.outcomes[0] is told
    assert [outcome.sharing for outcome in controller.outcomes] == [8] * (2 if cause is Cause.PUSHED else 1)
    assert isinstance(loop.next(0.0), Wait)


TREE = DraftTree((5, 6, 7, 8), (0, 0, 1, 3), (-0.1, -0.2, -0.3, -0.4), (2, 1))  # 5-7-8 and 6
PREFIX = [1, 2]


def compared(*committed: int) -> int | None:
    """Return the number of accepted tokens; None if the text does not decide the draft."""
    shadow = ShadowDraft()
    shadow.begin(2, TREE, 0.25)
    found = shadow.compare([*PREFIX, *committed], 0.5, 0.125, 3)
    assert shadow.pending == (found is None)
    if found is not None:
        assert (found.drafted, found.depth, found.draft_s, found.compute_s) == (4, 3, 0.25, None)
        assert found.sharing == 3
        assert found.waited_s == 0.5 + 4 * 0.125  # the target's pass is over the draft too
    return None if found is None else found.accepted


def test_a_shadow_draft_is_decided_when_the_text_leaves_it():
    assert compared() is None and compared(5) is None and compared(5, 7, 8) is None
    assert compared(9) == 0
    assert compared(6, 5) == 1
    assert compared(5, 7, 9) == 2
    assert compared(5, 7, 8, 9) == 3


def test_a_forgotten_draft_is_not_compared():
    shadow = ShadowDraft()
    shadow.begin(2, TREE, 0.25)
    shadow.forget()
    assert not shadow.pending and shadow.compare([*PREFIX, 9], 0.0, 0.0, 1) is None


def test_an_empty_draft_is_a_round_of_one_token():
    shadow = ShadowDraft()
    shadow.begin(2, DraftTree(), 0.0)
    found = shadow.compare([*PREFIX, 9], 0.5, 0.0, 1)
    assert found is not None and (found.accepted, found.depth) == (0, 0)
