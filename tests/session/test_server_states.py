"""The verifier's table: each rule, in each state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from moa_runtime.session.server import ServerSession
from moa_runtime.session.server_table import FRAMES, Does, Heard, State
from moa_runtime.session.work import Verify
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from session.wired import LIMITS, STOP, VOCAB

EPOCH, PROMPT = 3, [1, 2, 3]


def session_in(state: State) -> ServerSession:
    session = ServerSession(LIMITS, VOCAB, [STOP])
    work = session.receive(wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=PROMPT)))
    assert isinstance(work, Verify)
    if state in (State.WRITING, State.ENDED):
        session.decide(work, [], 5 if state is State.WRITING else STOP)
    if state is State.SILENT:
        session.receive(wire.ClientMessage(cancel=wire.Cancel(epoch=EPOCH, base_len=len(PROMPT))))
    return session


#: Each in a conversation that has so many committed tokens.
MESSAGES: Mapping[Heard, Callable[[int], wire.ClientMessage]] = {
    Heard.STALE: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH - 1, base_len=n)),
    Heard.BEYOND: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n + 1)),
    Heard.PROMPT: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH + 1, base_len=2, tokens=[4])),
    Heard.PROMPT_AGAIN: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=PROMPT)),
    Heard.PROMPT_OTHER: lambda n: wire.ClientMessage(prompt=wire.Prompt(epoch=EPOCH, tokens=[4])),
    Heard.DRAFT: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n, tokens=[6])),
    Heard.DRAFT_BEFORE: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=n - 1, tokens=[5])),
    Heard.DRAFT_OUTSIDE: lambda n: wire.ClientMessage(draft=wire.Draft(epoch=EPOCH, base_len=len(PROMPT) - 1)),
    Heard.CREDIT: lambda n: wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=n + 9, serial=1)),
    Heard.CREDIT_SPENT: lambda n: wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=n, serial=1)),
    Heard.CREDIT_EARLY: lambda n: wire.ClientMessage(credit=wire.Credit(epoch=EPOCH + 1, position=n + 9, serial=1)),
    Heard.CANCEL: lambda n: wire.ClientMessage(cancel=wire.Cancel(epoch=EPOCH, base_len=2)),
    Heard.PING: lambda n: wire.ClientMessage(ping=wire.Ping()),
    Heard.OTHER: lambda n: wire.ClientMessage(hello=wire.Hello()),
}
ANSWERS = {
    Does.BEGIN: "work",
    Does.DECIDE: "work",
    Does.VERIFY: "work",
    Does.REPEAT: "verdict",
    Does.STAND: "standing",
    Does.ANSWER_PING: "pong",
    Does.LACKS: "FAULT_CODE_OUT_OF_SYNC",
    Does.NO_ANSWER: "FAULT_CODE_OUT_OF_SYNC",
    Does.REFUSE: "FAULT_CODE_PROTOCOL",
}


def said(answer: Verify | wire.ServerMessage | None) -> str | None:
    if answer is None or isinstance(answer, Verify):
        return None if answer is None else "work"
    return wire.FaultCode.Name(answer.fault.code) if answer.HasField("fault") else answer.WhichOneof("event")


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
@pytest.mark.parametrize("heard", Heard, ids=lambda heard: heard.name)
def test_a_frame_does_what_the_table_says(heard: Heard, state: State) -> None:
    session = session_in(state)
    before, message = list(session.committed), MESSAGES[heard](len(session.committed))
    assert session.state is state
    if state not in FRAMES[heard]:
        assert session.heard(message) is not heard
        return
    assert session.heard(message) is heard
    row = FRAMES[heard][state]
    answer = session.receive(message)
    assert said(answer) == ANSWERS.get(row.does)
    assert session.state is (row.leads or state)
    expected = {Does.BEGIN: [1, 2, 4], Does.STOP: [1, 2]}.get(row.does, before)
    assert session.committed == expected
    if row.does is Does.REPEAT:
        assert isinstance(answer, wire.ServerMessage) and list(answer.verdict.tokens) == before[len(PROMPT) :]
    if row.does is Does.LACKS:
        assert isinstance(answer, wire.ServerMessage) and answer.fault.committed_length == len(before)


@pytest.mark.parametrize("told", [False, True])
def test_a_credit_brings_first_what_the_client_was_not_told(told: bool) -> None:
    session = session_in(State.ASKED)
    work = session.receive(MESSAGES[Heard.PROMPT_AGAIN](3))
    assert isinstance(work, Verify)
    session.decide(work, [], 5, told=told)
    answer = session.receive(wire.ClientMessage(credit=wire.Credit(epoch=EPOCH, position=9, serial=1)))
    assert said(answer) == (None if told else "verdict") and session.pushes
