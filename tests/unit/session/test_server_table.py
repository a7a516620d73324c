"""The server session follows its table: each event in each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from moa_runtime.session.server import ServerSession, Verify
from moa_runtime.session.server_table import FRAMES, Action, Event, State
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from support.session.fixtures_pair import LIMITS, STOP, VOCAB

EPOCH, PROMPT = 3, [1, 2, 3]


def session_in(state: State) -> ServerSession:
    session = ServerSession(LIMITS, VOCAB, [STOP])
    work = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=PROMPT)))
    assert isinstance(work, Verify)
    if state in (State.ANSWERING, State.ENDED):
        session.decide(work, [], 5 if state is State.ANSWERING else STOP)
    if state is State.IDLE:
        session.receive(wire.ClientMessage(cancel=wire.Cancel(epoch=EPOCH, base_len=len(PROMPT))))
    return session


#: A frame of each event, for a conversation with ``n`` committed tokens.
MESSAGES: Mapping[Event, Callable[[int], wire.ClientMessage]] = {
    Event.STALE: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH - 1, base_len=n)),
    Event.BEYOND_COMMITTED: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n + 1)),
    Event.PROMPT: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH + 1, base_len=2, tokens=[4])),
    Event.PROMPT_REPEATED: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=PROMPT)),
    Event.PROMPT_CONFLICT: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=[4])),
    Event.DRAFT: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n, tokens=[6])),
    Event.DRAFT_EARLIER: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n - 1, tokens=[5])),
    Event.DRAFT_UNSOLICITED: lambda n: wire.ClientMessage(
        draft=wire.Draft(epoch=EPOCH, base_len=n, tokens=[6], unsolicited=True)
    ),
    Event.DRAFT_OUTSIDE_ANSWER: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=len(PROMPT) - 1)),
    Event.CREDIT: lambda n: wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=n + 9, serial=1)),
    Event.CREDIT_REVOKED: lambda n: wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=n, serial=1)),
    Event.CREDIT_NEWER_EPOCH: lambda n: wire.ClientMessage(
        credit=wire.Credit(epoch=EPOCH + 1, position=n + 9, serial=1)
    ),
    Event.CANCEL: lambda n: wire.ClientMessage(cancel=wire.Cancel(epoch=EPOCH, base_len=2)),
    Event.PING: lambda n: wire.ClientMessage(ping=wire.Ping()),
    Event.UNEXPECTED: lambda n: wire.ClientMessage(hello=wire.Hello()),
}
ANSWERS = {
    Action.BEGIN_ANSWER: "work",
    Action.DECIDE_TOKEN: "work",
    Action.VERIFY: "work",
    Action.REPEAT: "verdict",
    Action.REVOKE_CREDIT: "standing",
    Action.ANSWER_PING: "pong",
    Action.OUT_OF_SYNC: "FAULT_CODE_OUT_OF_SYNC",
    Action.NO_ANSWER: "FAULT_CODE_OUT_OF_SYNC",
    Action.REFUSE: "FAULT_CODE_PROTOCOL",
}


def said(answer: Verify | wire.ServerMessage | None) -> str | None:
    if answer is None or isinstance(answer, Verify):
        return None if answer is None else "work"
    return wire.FaultCode.Name(answer.fault.code) if answer.HasField("fault") else answer.WhichOneof("event")


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_every_frame_in_every_state_follows_the_table(event: Event, state: State) -> None:
    session = session_in(state)
    before, message = list(session.committed), MESSAGES[event](len(session.committed))
    assert session.state is state
    if state not in FRAMES[event]:
        assert session.classify(message) is not event
        return
    assert session.classify(message) is event
    row = FRAMES[event][state]
    answer = session.receive(message)
    assert said(answer) == ANSWERS.get(row.action)
    assert session.state is (row.next_state or state)
    expected = {Action.BEGIN_ANSWER: [1, 2, 4], Action.CANCEL: [1, 2]}.get(row.action, before)
    assert session.committed == expected
    if row.action is Action.REPEAT:
        assert isinstance(answer, wire.ServerMessage) and list(answer.verdict.tokens) == before[len(PROMPT) :]
        assert answer.verdict.accepted == (event is Event.DRAFT_EARLIER and before[-1] == 5)
    if event in (Event.CREDIT, Event.CREDIT_REVOKED):
        assert session.pushes == (event is Event.CREDIT and session.runs)
    assert (session.newest_draft() is not None) is (row.action is Action.KEEP_DRAFT and state is not State.IDLE)
    if row.action is Action.OUT_OF_SYNC:
        assert isinstance(answer, wire.ServerMessage) and answer.fault.committed_length == len(before)


@pytest.mark.parametrize("sent", [False, True])
def test_credit_is_answered_first_with_tokens_that_were_not_sent(sent: bool) -> None:
    session = session_in(State.PROMPTED)
    work = session.receive(MESSAGES[Event.PROMPT_REPEATED](3))
    assert isinstance(work, Verify)
    session.decide(work, [], 5, sent=sent)
    answer = session.receive(wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=9, serial=1)))
    assert said(answer) == (None if sent else "verdict") and session.pushes
