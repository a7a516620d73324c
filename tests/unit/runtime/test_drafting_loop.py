"""Drafts of the loop while the server streams, over a link that delays and loses them; all else: tests/vectors
(``loop/walks``)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_runtime.drafters.base import GREEDY, Budget, RowlessDrafter
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.drafting.events import Draft, Drafted, LoopEvent, Pushed
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.timeouts import Timeouts
from moa_runtime.options import Conditions, Drafting, LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Faulted, Origin, Sampling
from moa_runtime.session.server import ServerSession, Verify, parse_client_message
from moa_runtime.session.tree import DraftTree, accepted_path
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import LIMITS, PRINTS, STOP, VOCAB, choice, decode, wrong

_STEP_S, _PASS_S = 0.001, 0.01


class _Guesser(RowlessDrafter):
    """Drafts the target's tokens, each with probability ``skill``."""

    def __init__(self, skill: float) -> None:
        self._skill, self._draws = skill, random.Random(1)

    def propose(self, prefix: list[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:  # type: ignore[override]
        text = list(prefix)
        for _ in range(min(budget.levels, budget.nodes)):
            token = choice(text)
            text.append(token if self._draws.random() < self._skill else wrong(token))
        tokens = text[len(prefix) :]
        return DraftTree.chain(tokens, [math.log(self._skill)] * len(tokens), [1] * len(tokens))


class _Streamed:
    """A loop and a toy verifier, in steps of one pass of the target; ``takes``: whether it takes unsolicited drafts."""

    def __init__(self, drafter: RowlessDrafter, *, takes: bool = True, drafting: Drafting = "auto") -> None:
        self.session = ClientSession(PRINTS, stop_tokens=[STOP])
        self.loop = DraftingLoop(self.session, drafter, FixedShape(Budget.chain(3)), LoopSettings(drafting=drafting))
        self.events: list[LoopEvent] = []
        self.loop.listen(self.events.append)
        self.up: list[wire.ClientMessage] = []
        self._server = ServerSession(replace(LIMITS, max_context=4096), VOCAB, [STOP])
        self._takes, self._now, self._work = takes, 1000.0, list[Verify]()
        self.loop.opened()

    def pump(self) -> list[wire.ClientMessage]:
        """Let the device draft and send until it waits; return the unsolicited drafts that it sent."""
        sent = []
        while True:
            todo = self.loop.next(self._now)
            if isinstance(todo, Draft):
                tree = todo.by.propose(todo.prefix, todo.budget, todo.sampling)
                seconds = _STEP_S * len(tree.steps)
                self._now += seconds
                self.loop.drafted(todo, tree, seconds, self._now)
            for frame in self.loop.frames_to_send(self._now):
                message = parse_client_message(frame)
                assert isinstance(message, wire.ClientMessage)
                (sent if message.draft.unsolicited else self.up).append(message)
            if not isinstance(todo, Draft):
                return sent

    def step(self, arrived: list[wire.ClientMessage]) -> None:
        """Let the frames and the unsolicited drafts ``arrived`` arrive, then the target takes a pass."""
        for message in [*self.up, *arrived]:
            if message.HasField("hello"):
                (welcome,) = self._server.greet(message.hello, "resume")
                welcome.welcome.capabilities.extend([wire.CAPABILITY_UNSOLICITED_DRAFTS] * self._takes)
                self._tell(welcome)
                continue
            answer = self._server.receive(message)
            if isinstance(answer, Verify):
                self._decide(answer, 0)
            elif answer is not None:
                self._tell(answer)
        self.up.clear()
        self._now += _PASS_S
        work = self._server.next_work(rows=False)
        if isinstance(work, Verify):
            newest = self._server.newest_draft()
            if newest is not None:
                work = replace(work, draft=newest.tokens, parents=newest.parents)
            self._decide(work, 0 if newest is None else newest.stamp)

    def _decide(self, work: Verify, stamp: int) -> None:
        paths = [list(work.prefix)]
        for token, parent in zip(work.draft, work.parents, strict=True):
            paths.append([*paths[parent], token])
        choices = [choice(path) for path in paths]
        path = accepted_path(work.draft, work.parents, choices)
        self._tell(self._server.decide(work, path, choices[path[-1] + 1 if path else 0], draft_stamp=stamp))

    def _tell(self, message: wire.ServerMessage) -> None:
        self.loop.received(message.SerializeToString(), self._now)

    def of(self, kind: type) -> list[LoopEvent]:
        return [event for event in self.events if isinstance(event, kind)]


_PROMPT, _TEXT = [2], decode([2], 400)  # the longest answer of a single token


def _finish(streamed: _Streamed, arrive: Callable[[list[wire.ClientMessage]], list[wire.ClientMessage]]) -> int:
    """Run an answer to its end; ``arrive`` takes each pump's unsolicited drafts and returns those that arrive now."""
    sent = 0
    streamed.loop.ask(0, _PROMPT, Sampling(), 0)
    for _ in range(2 * len(_TEXT)):
        drafts = streamed.pump()
        sent += len(drafts)
        if not streamed.loop.answering:
            break
        streamed.step(arrive(drafts))
    assert streamed.loop.committed == _TEXT and not streamed.of(Faulted)
    return sent


def test_drafts_are_sent_while_the_server_streams_and_shorten_the_answer() -> None:
    streamed = _Streamed(_Guesser(0.9))
    sent = _finish(streamed, lambda drafts: drafts)
    pushed = [event for event in streamed.of(Pushed) if event.draft_stamp]
    used = sum(event.accepted for event in pushed)
    origins = [origin for event in streamed.of(Committed) for origin in event.origins]
    assert sent > 10 and used > 20 and origins.count(Origin.DRAFTED) >= used
    assert sum(event.unsolicited > 0 for event in streamed.of(Drafted)) == sent
    # The time between verdicts does not begin anew when a draft is sent.
    assert min(event.waited_s for event in pushed[1:]) > _PASS_S + _STEP_S / 2


@pytest.mark.parametrize(
    ("takes", "conditions"),
    [
        (False, Conditions()),
        (True, Conditions(low_power=True)),
        (True, Conditions(metered=True)),
        (True, Conditions(background=True)),
    ],
)
def test_no_draft_is_sent_if_the_server_takes_none_or_the_device_has_to_save(takes, conditions):
    streamed = _Streamed(_Guesser(0.9), takes=takes)
    streamed.loop.ask(0, _PROMPT, Sampling(), 0)
    for _ in range(3):
        streamed.step(streamed.pump())
    streamed.loop.conditions = conditions
    for _ in range(10):
        assert not streamed.pump()
        streamed.step([])


@pytest.mark.parametrize("stem", [[], _TEXT[1:3]], ids=["alone", "after text of unknown probability"])
def test_a_draft_names_confidences_if_all_are_known(stem: list[int]) -> None:
    streamed = _Streamed(_Guesser(0.5), drafting="device")
    streamed.loop.ask(0, _PROMPT, Sampling(), 0, draft=stem)
    streamed.pump()
    streamed.step([])  # a Welcome
    streamed.pump()
    streamed.step([])  # the prompt's verdict
    streamed.pump()
    (draft,) = (message.draft for message in streamed.up if message.HasField("draft"))
    left = stem[1:]  # the first one is decided
    assert len(draft.tokens) > len(left) and draft.tokens[: len(left)] == left
    assert len(draft.confidences) == (0 if stem else len(draft.tokens))


def test_a_verdict_may_have_arrived_before_the_frame_that_was_sent_last() -> None:
    timeouts = Timeouts(LoopSettings())
    timeouts.sent(2.0, prefill=False)
    assert timeouts.answered(1.5) == 0.0


def test_drafts_that_never_arrive_pause() -> None:
    streamed = _Streamed(_Guesser(0.02))
    assert 10 < _finish(streamed, lambda drafts: []) < 30


@settings(max_examples=40)
@given(data=st.data(), skill=st.sampled_from([0.3, 0.9]))
def test_late_stale_lost_and_reordered_drafts_do_not_change_the_text(data: st.DataObject, skill: float) -> None:
    held: list[wire.ClientMessage] = []

    def arrive(drafts: list[wire.ClientMessage]) -> list[wire.ClientMessage]:
        held.extend(drafts)
        count = data.draw(st.integers(0, len(held)))
        arrived = data.draw(st.permutations(held))[:count]
        if data.draw(st.booleans()):
            held[:] = [each for each in held if each not in arrived]  # else they arrive again
        for each in arrived:
            if data.draw(st.integers(0, 9)) == 0:
                del each.draft.tokens[1:], each.draft.parents[1:]
                each.draft.confidences = each.draft.confidences[:1]
        return arrived

    _finish(_Streamed(_Guesser(skill)), arrive)
