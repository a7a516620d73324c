"""Trials go behind the memory rows that have come, wherever the text is by then."""

from __future__ import annotations

import numpy as np

from moa_runtime.drafters.base import GREEDY, Budget
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import Draft
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Sampling
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
    """Both ends of a connection without delay; the server pushes a verdict when it is told to, and rows too."""

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
        """A verdict of one token, a second later."""
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


def test_a_trial_waits_for_the_rows_of_the_prompt_and_is_made_where_a_round_would_have_been():
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
