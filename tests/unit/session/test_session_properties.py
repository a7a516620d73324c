"""The system's main test: whatever the link does, both ends agree, and on the target's own text.

The toy target chooses by the whole prefix, as the real one does greedily or with a generator keyed by the position:
text that is decided again after a rewind is the same.

``MOA_EXAMPLES=20000`` in the environment has as many schedules tried (with ``--timeout 0 -o faulthandler_timeout=0``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from moa_runtime.session.client import ClientSession, LinkState
from moa_runtime.session.events import Committed, Faulted, Origin, Policy, RolledBack, Sampling
from moa_runtime.session.handshake import fault
from moa_runtime.session.tree import accepted_path, chain
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_invariants import InvariantMachine, Known
from support.session.fixtures_pair import LIMITS, STOP, Pair, choice, decode

#: Enough of each index for any queue the machine builds; taken modulo its length.
PLACE = st.integers(0, 7)

#: Where branches hang, and which of their tokens are the target's.
BRANCHES = st.lists(st.tuples(st.integers(0, 15), st.lists(st.booleans(), min_size=1, max_size=4)), max_size=4)


def is_event(frame: bytes, upward: bool) -> bool:
    """Whether a part of a frame happens to be a message that holds an event."""
    try:
        message = (wire.ClientMessage if upward else wire.ServerMessage).FromString(frame)
    except DecodeError:
        return False
    return message.WhichOneof("event") is not None


def right_tokens(client: ClientSession, tokens: Sequence[int], parents: Sequence[int]) -> int:
    """How many tokens of a draft the target would write itself."""
    texts = [list(client.committed)]
    for token, parent in zip(tokens, parents, strict=True):
        texts.append([*texts[parent], token])
    return len(accepted_path(tokens, parents, [choice(text) for text in texts]))


class LossyMachine(InvariantMachine):
    policy = Policy.ROLLBACK

    @initialize(
        greeted=st.booleans(),
        max_new_tokens=st.sampled_from([0, 5, 20, 40]),
        prompt=st.lists(st.integers(1, 12), min_size=1, max_size=6),
        trees=st.booleans(),
        while_away=st.booleans(),
        unsolicited=st.booleans(),
    )
    def begin(
        self, greeted: bool, max_new_tokens: int, prompt: list[int], trees: bool, while_away: bool, unsolicited: bool
    ) -> None:
        self.watch(Pair(self.policy, trees=trees))
        self.pair.server.capabilities = [wire.CAPABILITY_UNSOLICITED_DRAFTS] if unsolicited else []
        self.saved: tuple[str, Known, int] | None = None
        self.pair.connect()
        if greeted:
            self.pair.settle()
        self._ask(prompt, max_new_tokens, while_away)

    def _ask(self, prompt: list[int], max_new_tokens: int, while_away: bool = True) -> None:
        start = [*self.pair.client.committed, *prompt]
        limit = min(LIMITS.max_context, len(start) + max_new_tokens) if max_new_tokens else LIMITS.max_context
        self.known = replace(self.known, prompt_end=len(start), limit=limit, expected=tuple(decode(start, limit)))
        self.pair.client.prompt(prompt, Sampling(), max_new_tokens, while_away=while_away)
        self.pair.flush()

    @rule(count=st.integers(1, 12), right=st.booleans(), online=st.booleans())
    @precondition(lambda self: self.pair.client.answering)
    def draft(self, count: int, right: bool, online: bool) -> None:
        before = len(self.pair.client.tentative)
        self.pair.write(count, right, Origin.DRAFTED if online else Origin.OFFLINE)
        written = len(self.pair.client.tentative) - before
        self.known = replace(self.known, written=self.known.written + written)

    @rule(after=st.integers(0, 12))
    def declare_offline(self, after: int) -> None:
        """An outage begins after the first ``after`` tentative tokens."""
        client = self.pair.client
        tentative, before = len(client.tentative), client.unconfirmed
        kept = len(before) - tentative
        assert client.declare_offline(after) == (tentative > after)
        assert client.unconfirmed == (
            *before[: kept + after],
            *((token, Origin.OFFLINE) for token, _ in before[kept + after :]),
        )

    @rule(branches=BRANCHES, by_level=st.booleans(), most=st.integers(0, 16))
    def propose(self, branches: list[tuple[int, list[bool]]], by_level: bool, most: int) -> None:
        self.pair.client.propose(most, tree=self.pair.tree(branches, by_level) if branches else None)
        self.pair.flush()

    @rule(branches=BRANCHES, by_level=st.booleans(), most=st.integers(0, 16))
    def undisturbed_round(self, branches: list[tuple[int, list[bool]]], by_level: bool, most: int) -> None:
        """Everything under way arrives, then one round: all of its draft that is right is committed."""
        self.pair.settle()
        client = self.pair.client
        tree, before = self.pair.tree(branches, by_level), len(client.committed)
        # Where the server went on unheard it is further, and answers from there, without a pass.
        reached = len(self.pair.server.session.committed)
        fits = min(most, LIMITS.max_context - before)  # the server leaves out what the context has no room for
        right = right_tokens(client, tree.tokens[:fits], tree.parents[:fits])
        if not client.limits.trees:
            right = right_tokens(client, client.tentative[:fits], chain(len(client.tentative[:fits])))
        proposed = client.propose(most, tree=tree if branches else None)
        self.pair.settle()
        if proposed and self.policy is Policy.ROLLBACK:
            assert client.committed == list(self.known.expected[: reached if reached > before else before + right + 1])

    @rule(right=PLACE, branches=BRANCHES, by_level=st.booleans(), back=PLACE)
    def send_unsolicited(self, right: int, branches: list[tuple[int, list[bool]]], by_level: bool, back: int) -> None:
        """A draft from a position ``back``: what was committed since is right so far, or not."""
        client = self.pair.client
        if client.may_send_unsolicited:
            base = max(client.answer_start, len(client.committed) - back)
            path = (0, [True] * right + [False])
            client.send_unsolicited(self.pair.tree([path, *branches], by_level, base), base)
            self.pair.flush()

    @rule(right=PLACE, branches=BRANCHES, back=PLACE, late=st.integers(0, 4), drafted=st.integers(0, 9))
    @precondition(lambda self: self.pair.client.answering)
    def stream_with_a_draft(
        self, right: int, branches: list[tuple[int, list[bool]]], back: int, late: int, drafted: int
    ) -> None:
        """The device drafts beside a server that pushes; the draft arrives ``late`` verdicts later."""
        self.pair.arrive()
        if self.pair.client.may_grant_credit and not self.pair.client.credit_open:
            self.grant_credit(20)
            self.pair.arrive()
        for _ in range(late):
            self.pair.push()
        self.send_unsolicited(right, branches, False, back)
        while self.pair.up:
            self.pair.deliver_up()
        self.pair.push(drafted, own=False)

    @rule()
    def resend(self) -> None:
        self.pair.client.resend()
        self.pair.flush()

    @rule(ahead=st.integers(1, 20))
    @precondition(lambda self: self.pair.client.may_grant_credit)
    def grant_credit(self, ahead: int) -> None:
        """The server may push verdicts."""
        client = self.pair.client
        client.grant_credit(len(client.committed) + client.supplied + ahead)
        self.pair.flush()

    @rule()
    def revoke_credit(self) -> None:
        self.pair.client.revoke_credit()
        self.pair.flush()

    @rule(drafted=st.integers(0, 6), own=st.booleans())
    def server_pushes_within_the_credit(self, drafted: int, own: bool) -> None:
        before = len(self.pair.server.session.committed)
        pushes = self.pair.server.session.pushes
        self.pair.push(drafted, own=own)
        assert pushes or len(self.pair.server.session.committed) == before

    @rule()
    def the_engine_fails(self) -> None:
        if self.pair.server.session.pushes:
            self.pair.server.session.engine_failed()
            self.pair.down.append(fault(wire.FAULT_CODE_INTERNAL, "it failed", retry_after_ms=1).SerializeToString())

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

    @rule(tokens=st.integers(1, 40))
    def server_continues_alone(self, tokens: int) -> None:
        self.pair.server.go_on(tokens)

    @rule()
    @precondition(lambda self: self.pair.client.link is LinkState.DOWN)
    def reconnect(self) -> None:
        self.pair.connect()

    @rule(trees=st.booleans())
    def server_restarts(self, trees: bool) -> None:
        self.pair.cut()
        self.pair.server.restart(replace(LIMITS, trees=trees))
        self.server_forgot = True

    @rule()
    def close_and_restore(self) -> None:
        """The client's process ends; the next one restores its last state."""
        before = self.pair.client
        self.pair.reopen(json.loads(json.dumps(before.snapshot())))
        client = self.pair.client
        assert client.tokens == before.tokens and client.unconfirmed == before.unconfirmed
        assert client.answering == before.answering and client.room == before.room
        assert client.snapshot() == before.snapshot()

    @rule()
    def save(self) -> None:
        self.saved = json.dumps(self.pair.client.snapshot()), self.known, len(self.pair.events)

    @rule()
    @precondition(lambda self: self.saved is not None)
    def crash_and_restore(self) -> None:
        """The client's process is killed; the next one restores an older snapshot."""
        snapshot, self.known, events = self.saved
        self.saved = None  # once: the next process replaces it before its Hello, so no third one skips as many epochs
        del self.pair.events[events:]
        self.pair.reopen(json.loads(snapshot))
        self.server_forgot = True  # what it has may be of another text

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
            committed = tuple(self.pair.client.committed)
            self.known = replace(self.known, expected=committed, prompt_end=len(committed) + 1)

    @rule(place=st.integers(0, 95), prompt=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    def rewind_and_ask_again(self, place: int, prompt: list[int]) -> None:
        """Regenerate, edit, restore: the answer is stopped, and an earlier part of the conversation continued."""
        client = self.pair.client
        kept = place % (len(client.committed) + 1)
        if kept + len(prompt) >= LIMITS.max_context:
            return  # refused: CONTEXT_FULL
        self.pair.events += client.cancel()
        client.rewind(kept)
        self.pair.forget_rows(len(client.committed))
        self.pair.flush()
        self._ask(prompt, 10)

    @rule(more=st.integers(0, 20), place=st.integers(0, 95))
    def continue_answer(self, more: int, place: int) -> None:
        """The answer is finished or cancelled, then rewound to a position."""
        client, start = self.pair.client, self.known.prompt_end
        self.pair.events += client.cancel()
        self.pair.flush()
        if len(client.committed) <= start:
            return
        end = start + 1 + place % (len(client.committed) - start)
        whole = list(client.committed[:end])
        if whole[-1] == STOP or end >= LIMITS.max_context:
            return
        client.rewind(end - end % 2)
        self.pair.forget_rows(len(client.committed))
        limit = min(LIMITS.max_context, end + more) if more else LIMITS.max_context
        self.known = replace(self.known, limit=limit, expected=tuple(decode(whole, limit)))
        client.continue_answer(whole[len(client.committed) :], start, Sampling(), more)
        self.pair.flush()

    @rule(place=st.integers(0, 95), kept=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    @precondition(lambda self: len(self.pair.client.committed) >= self.known.prompt_end)
    def keep(self, place: int, kept: list[int]) -> None:
        """The answer, running or finished, is truncated and continued after other tokens."""
        client, prompt_end = self.pair.client, self.known.prompt_end
        start = prompt_end + place % (len(client.committed) - prompt_end + 1)
        begun = [*client.committed[:start], *kept]
        if len(begun) >= self.known.limit:
            return
        self.pair.events += client.keep(start, kept)
        self.pair.forget_rows(start)
        self.pair.flush()
        expected = tuple(decode(begun, self.known.limit))
        self.known = replace(self.known, expected=expected, kept=self.known.kept + len(kept))

    @rule()
    def complete(self) -> None:
        """Heal the link: the answer ends, and is the target's own."""
        client = self.pair.client
        if not client.answering:
            return
        self.pair.finish()
        self.check_text()
        assert self.policy is Policy.KEEP or client.committed == list(self.known.expected)
        self.pair.settle()
        assert self.pair.server.session.committed == client.committed
        self.server_forgot = False

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.complete()
            faults = {e.code for e in self.pair.events if isinstance(e, Faulted)}
            assert faults <= {"PROTOCOL", "INTERNAL"}, faults


class KeepMachine(LossyMachine):
    """Offline tokens stay; every other token is the target's choice after the tokens before it."""

    policy = Policy.KEEP

    def check_text(self) -> None:
        committed, chosen = self.pair.client.committed, {}
        for event in self.pair.events:
            if isinstance(event, Committed):
                chosen = {place: origin for place, origin in chosen.items() if place < event.start}
                chosen |= {event.start + i: origin for i, origin in enumerate(event.origins)}
        for place in range(self.known.prompt_end, len(committed)):
            assert chosen[place] is Origin.KEPT or committed[place] == choice(committed[:place])

    def check_accounts(self) -> None:
        dropped = [token for e in self.pair.events if isinstance(e, RolledBack) for token in e.tokens]
        kept = [o for e in self.pair.events if isinstance(e, Committed) for o in e.origins if o is Origin.KEPT]
        assert len(dropped) <= self.known.written and len(kept) <= self.known.written + self.known.kept


EXAMPLES = int(os.environ.get("MOA_EXAMPLES", "300"))
LossyMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)
TestLossyMachine = LossyMachine.TestCase
KeepMachine.TestCase.settings = settings(max_examples=EXAMPLES // 2, stateful_step_count=40)
TestKeepMachine = KeepMachine.TestCase


def test_the_toy_target_ends_turns() -> None:
    assert decode([3, 4], 400)[-1] == STOP
