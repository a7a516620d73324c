"""The system's main test: whatever the link does, both ends agree, and on the target's own text.

The toy target chooses by the whole prefix, as the real one does greedily or with a generator keyed by the position:
text that is decided again after a rewind is the same.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moa_runtime.session.client import LinkState
from moa_runtime.session.events import Committed, Faulted, Origin, Policy, RolledBack, RowsReceived, Sampling
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from session.wired import LIMITS, STOP, Pair, choice, decode

#: Enough of each index for any queue the machine builds; taken modulo its length.
PLACE = st.integers(0, 7)


def is_event(frame: bytes, upward: bool) -> bool:
    """Whether a part of a frame happens to be a message that holds an event."""
    try:
        message = (wire.ClientMessage if upward else wire.ServerMessage).FromString(frame)
    except DecodeError:
        return False
    return message.WhichOneof("event") is not None


class LossyLink(RuleBasedStateMachine):
    policy = Policy.ROLLBACK

    @initialize(
        greeted=st.booleans(),
        max_new_tokens=st.sampled_from([0, 5, 20, 40]),
        prompt=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    )
    def begin(self, greeted: bool, max_new_tokens: int, prompt: list[int]) -> None:
        self.pair = Pair(self.policy)
        self.expected: list[int] = []
        self.mark = 0
        self.written = self.kept = 0
        self.server_forgot = False
        self.pair.connect()
        if greeted:
            self.pair.settle()
        self._ask(prompt, max_new_tokens)

    def _ask(self, prompt: list[int], max_new_tokens: int) -> None:
        start = [*self.pair.client.committed, *prompt]
        self.prompt_end = len(start)
        self.limit = min(LIMITS.max_context, len(start) + max_new_tokens) if max_new_tokens else LIMITS.max_context
        self.expected = decode(start, self.limit)
        self.pair.client.prompt(prompt, Sampling(), max_new_tokens)
        self.pair.flush()

    @rule(count=st.integers(1, 12), right=st.booleans(), online=st.booleans())
    @precondition(lambda self: self.pair.client.answering)
    def draft(self, count: int, right: bool, online: bool) -> None:
        before = len(self.pair.client.tentative)
        self.pair.write(count, right, Origin.DRAFTED if online else Origin.OFFLINE)
        self.written += len(self.pair.client.tentative) - before

    @rule(most=st.integers(0, 16))
    def undisturbed_round(self, most: int) -> None:
        """Everything under way arrives, then one round."""
        self.pair.settle()
        self.pair.client.propose(most)
        self.pair.settle()

    @rule(most=st.integers(0, 16))
    def propose(self, most: int) -> None:
        self.pair.client.propose(most)
        self.pair.flush()

    @rule()
    def resend(self) -> None:
        self.pair.client.resend()
        self.pair.flush()

    @rule(place=PLACE, upward=st.booleans())
    def deliver(self, place: int, upward: bool) -> None:
        """In order mostly; out of order when the place drawn is not the first."""
        queue = self.pair.up if upward else self.pair.down
        if queue:
            (self.pair.deliver_up if upward else self.pair.deliver_down)(place % len(queue))

    @rule(place=PLACE, upward=st.booleans())
    def drop(self, place: int, upward: bool) -> None:
        queue = self.pair.up if upward else self.pair.down
        if queue:
            del queue[place % len(queue)]

    @rule(place=PLACE, upward=st.booleans())
    def duplicate(self, place: int, upward: bool) -> None:
        queue = self.pair.up if upward else self.pair.down
        if queue:
            queue.append(queue[place % len(queue)])

    @rule(place=PLACE, cut=st.integers(1, 30), upward=st.booleans())
    def split(self, place: int, cut: int, upward: bool) -> None:
        queue = self.pair.up if upward else self.pair.down
        if queue:
            at = place % len(queue)
            parts = [queue[at][:cut], queue[at][cut:]]
            # About one part in 3,500 is a frame of its own: a forged one, not a broken one.
            if not any(is_event(part, upward) for part in parts):
                queue[at : at + 1] = parts

    @rule(noise=st.binary(max_size=40), upward=st.booleans())
    def inject_noise(self, noise: bytes, upward: bool) -> None:
        # A leading group-end tag makes it no protobuf message: noise, not a forged frame.
        (self.pair.up if upward else self.pair.down).append(b"\x0c" + noise)

    @rule()
    def cut_link(self) -> None:
        self.pair.cut()

    @rule()
    @precondition(lambda self: self.pair.client.link is LinkState.DOWN)
    def reconnect(self) -> None:
        self.pair.connect()

    @rule()
    def server_loses_everything(self) -> None:
        self.pair.cut()
        self.pair.server.restart()
        self.server_forgot = True

    @rule(prompt=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    def finish_and_ask_again(self, prompt: list[int]) -> None:
        self.complete()
        if len(self.pair.client.committed) + len(prompt) < LIMITS.max_context - 1:
            self._ask(prompt, 10)

    @rule(prompt=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    def cancel_and_ask_again(self, prompt: list[int]) -> None:
        self.pair.events += self.pair.client.cancel()
        self.pair.flush()
        if len(self.pair.client.committed) + len(prompt) < LIMITS.max_context - 1:
            self._ask(prompt, 10)
        else:
            self.expected = list(self.pair.client.committed)
            self.prompt_end = len(self.expected) + 1

    @rule(place=st.integers(0, 95), prompt=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    def rewind_and_ask_again(self, place: int, prompt: list[int]) -> None:
        """Regenerate, edit, restore: the answer is stopped, and an earlier part of the conversation continued."""
        client = self.pair.client
        self.pair.events += client.cancel()
        client.rewind(place % (len(client.committed) + 1))
        self.pair.flush()
        self._ask(prompt, 10)

    @rule(place=st.integers(0, 95), kept=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    @precondition(lambda self: len(self.pair.client.committed) >= self.prompt_end)
    def keep(self, place: int, kept: list[int]) -> None:
        """The answer, running or ended, is taken back, and continued behind other tokens."""
        client = self.pair.client
        start = self.prompt_end + place % (len(client.committed) - self.prompt_end + 1)
        begun = [*client.committed[:start], *kept]
        if len(begun) >= self.limit:
            return
        self.kept += len(kept)
        self.pair.events += client.keep(start, kept)
        self.pair.flush()
        self.expected = decode(begun, self.limit)

    @rule()
    def complete(self) -> None:
        """Heal the link: the answer ends, and is the target's own."""
        client = self.pair.client
        if not client.answering:
            return
        self.pair.finish()
        self.check_text()
        assert self.policy is Policy.KEEP or client.committed == self.expected
        self.pair.settle()
        assert self.pair.server.session.committed == client.committed
        self.server_forgot = False

    @invariant()
    def committed_is_what_the_target_writes(self) -> None:
        self.check_text()

    def check_text(self) -> None:
        committed = self.pair.client.committed
        assert committed == self.expected[: len(committed)]

    @invariant()
    def rows_are_never_ahead_of_the_target(self) -> None:
        client = self.pair.client
        assert client.rows <= len(client.committed)

    @invariant()
    def a_late_copy_never_sets_the_server_back(self) -> None:
        if not self.server_forgot:
            assert len(self.pair.server.session.committed) >= len(self.pair.client.committed)

    @invariant()
    def every_drafted_token_is_accounted_for(self) -> None:
        self.check_accounts()

    def check_accounts(self) -> None:
        accepted = [o for e in self.pair.events if isinstance(e, Committed) for o in e.origins]
        rolled_back = sum(len(e.tokens) for e in self.pair.events if isinstance(e, RolledBack))
        confirmed = sum(origin in (Origin.DRAFTED, Origin.OFFLINE) for origin in accepted)
        assert self.written == confirmed + rolled_back + len(self.pair.client.tentative)

    @invariant()
    def rows_arrive_whole(self) -> None:
        for event in self.pair.events[self.mark :]:
            if isinstance(event, RowsReceived):
                assert [float(k) for k in event.keys[:, 0, 0]] == [
                    float((event.start + i) % 100) for i in range(len(event.keys))
                ]
        self.mark = len(self.pair.events)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.complete()
            faults = {e.code for e in self.pair.events if isinstance(e, Faulted)}
            assert faults <= {"PROTOCOL"}, faults


class KeepingLink(LossyLink):
    """What was written offline stays; everything else is the target's choice after what then stands before it."""

    policy = Policy.KEEP

    def check_text(self) -> None:
        committed, chosen = self.pair.client.committed, {}
        for event in self.pair.events:
            if isinstance(event, Committed):
                chosen = {place: origin for place, origin in chosen.items() if place < event.start}
                chosen |= {event.start + i: origin for i, origin in enumerate(event.origins)}
        for place in range(self.prompt_end, len(committed)):
            assert chosen[place] is Origin.KEPT or committed[place] == choice(committed[:place])

    def check_accounts(self) -> None:
        dropped = [token for e in self.pair.events if isinstance(e, RolledBack) for token in e.tokens]
        kept = [o for e in self.pair.events if isinstance(e, Committed) for o in e.origins if o is Origin.KEPT]
        assert len(dropped) <= self.written and len(kept) <= self.written + self.kept


LossyLink.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestLossyLink = LossyLink.TestCase
KeepingLink.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKeepingLink = KeepingLink.TestCase


def test_the_toy_target_ends_turns() -> None:
    assert decode([3, 4], 400)[-1] == STOP
