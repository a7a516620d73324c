"""Every state of the model that can be reached is right and can come to its end; the model keeps to the client's table.

Part of ``make test-slow``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from moa_runtime.session.client_table import CALLS, FRAMES, Call, Event, State
from protocol_model import client as device
from protocol_model import server as verifier
from protocol_model.client import Client, WrongError
from protocol_model.explore import FoundError, explore
from protocol_model.frames import Credit, CreditRevoked, Rows, Verdict, Welcome
from protocol_model.server import Session, Work
from protocol_model.world import Bounds

SMALL = {
    "cuts": Bounds(drops=1, answer=3),
    "nothing is written while away": Bounds(drops=2, while_away=False),
    "the server drafts": Bounds(drops=0, credits=2, answer=3),
    "hand-over and a cut": Bounds(drops=1, credits=1),
    "drafts unasked": Bounds(drops=0, credits=2, unsolicited=2, answer=3),
    "drafts unasked, stopped and asked again": Bounds(drops=0, credits=2, unsolicited=1, cancels=1, questions=2),
    "the verifier restarts": Bounds(drops=1, server_restarts=1),
    "the program restarts": Bounds(drops=0, client_restarts=1),
    "the engine fails": Bounds(drops=0, failures=2, credits=1),
    "stopped, and asked again": Bounds(drops=0, cancels=1, questions=2, credits=1),
}
LARGE = {
    "cuts": Bounds(drops=2, answer=3),
    "hand-overs and cuts": Bounds(drops=2, credits=2, answer=3),
    "drafts unasked and cuts": Bounds(drops=1, credits=1, unsolicited=2, answer=3),
    "both ends restart": Bounds(drops=1, server_restarts=1, client_restarts=1),
    "the engine fails": Bounds(drops=1, failures=1, credits=2, answer=3),
    "stopped, and asked again": Bounds(drops=2, cancels=1, questions=2),
    "everything once": Bounds(drops=1, server_restarts=1, cancels=1, questions=2, credits=1),
}


@pytest.mark.parametrize("bounds", SMALL.values(), ids=SMALL)
def test_every_state_is_right_and_comes_to_its_end(bounds: Bounds) -> None:
    assert explore(bounds).states > 50


@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE)
def test_every_state_of_a_larger_world_does(bounds: Bounds) -> None:
    assert explore(bounds).states > 10_000


RESTORED = Bounds(drops=1, client_restarts=1)
SILENT = Bounds(drops=0, credits=1, answer=3)


@pytest.mark.parametrize("bounds", [RESTORED, SILENT], ids=["restored from an old state", "written unheard"])
def test_the_explorer_finds_rows_of_what_was_never_said(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    due, rows = verifier.rows_due, verifier.send_rows

    def as_said(session: Session) -> Session:
        return session._replace(told=len(session.committed), asked=True)

    def early(session: Session) -> verifier.Answered:
        sent, out = rows(as_said(session))
        return sent._replace(told=session.told, asked=session.asked), out

    monkeypatch.setattr(verifier, "rows_due", lambda session: due(as_said(session)))
    monkeypatch.setattr(verifier, "send_rows", early)
    with pytest.raises(FoundError, match="rows of other tokens"):
        explore(bounds)


def test_the_explorer_finds_rows_of_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = device._rows
    monkeypatch.setattr(device, "_rows", lambda client, frame: uncut(taken, client, frame))
    with pytest.raises(FoundError, match="rows of other tokens"):
        explore(Bounds(drops=0, cancels=1, questions=2, credits=1))


def test_the_explorer_finds_a_hand_over_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    credit = verifier._credit

    def silent(session: Session, frame: Credit) -> verifier.Answered:
        session, out = credit(session, frame)
        return session, tuple(frame for frame in out if not isinstance(frame, CreditRevoked))

    monkeypatch.setattr(verifier, "_credit", silent)
    with pytest.raises(FoundError, match="nothing happens any more"):
        explore(SILENT)


def test_the_explorer_finds_a_verdict_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that drafts before CreditRevoked arrived."""
    over = device.revoke_credit
    monkeypatch.setattr(device, "revoke_credit", lambda client: (over(client)[0]._replace(awaits=""), over(client)[1]))
    with pytest.raises(FoundError, match="a verdict without a request"):
        explore(SILENT)


def test_the_explorer_finds_text_that_was_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written for a device that seemed to be away."""
    credit = verifier._credit
    monkeypatch.setattr(
        verifier, "_credit", lambda session, frame: credit(session._replace(told=len(session.committed)), frame)
    )
    with pytest.raises(FoundError, match="nothing happens any more"):
        explore(SILENT)


def test_the_explorer_finds_an_answer_to_an_unsolicited_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may arrive after the credit was revoked."""
    keep = verifier.keep
    monkeypatch.setattr(
        verifier, "keep", lambda session, frame: keep(session, frame)._replace(work=session.work or Work(frame.tokens))
    )
    with pytest.raises(FoundError, match="a verdict without a request"):
        explore(Bounds(drops=0, credits=1, unsolicited=1, answer=3))


@pytest.mark.parametrize("forgets", ["_cut", "leave"])
def test_the_explorer_finds_a_draft_that_outlives_its_epoch_or_connection(
    forgets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = getattr(verifier, forgets)
    monkeypatch.setattr(verifier, forgets, lambda session, *args: forget(session, *args)._replace(kept=session.kept))
    with pytest.raises(FoundError, match="a draft of another epoch or connection"):
        explore(Bounds(drops=1, credits=1, unsolicited=1, cancels=1, answer=3))


def uncut(taken: Callable[[Client, Rows], Client], client: Client, frame: Rows) -> Client:
    """Takes up rows as if no epoch had begun since."""
    try:
        return taken(client._replace(cuts=()), frame)._replace(cuts=client.cuts)
    except WrongError:
        return client


def state_of(client: Client) -> State:
    """Where a client of the model is."""
    if client.link != "up":
        down = client.link == "down"
        if client.limit:
            return State.OFFLINE_ANSWERING if down else State.RESUMING
        return State.DOWN if down else State.HANDSHAKE
    if not client.limit:
        return State.IDLE
    awaited = {"revocation": State.REVOKING, "prompt": State.PROMPTED, "draft": State.PROPOSED}.get(client.awaits)
    return awaited or (State.STREAMING if client.credit > len(client.known) else State.DRAFTING)


def event_of(frame: Any, epoch: int) -> Event:
    if isinstance(frame, Welcome | Rows):
        return Event.WELCOME if isinstance(frame, Welcome) else Event.ROWS
    if isinstance(frame, Verdict | CreditRevoked):
        known = Event.VERDICT if isinstance(frame, Verdict) else Event.CREDIT_REVOKED
        return known if frame.epoch == epoch else Event.STALE
    return Event.FAULT


_MODELLED = {
    "connect": Call.CONNECT,
    "disconnected": Call.DISCONNECTED,
    "cancel": Call.CANCEL,
    "ask": Call.PROMPT,
    "propose": Call.PROPOSE,
    "grant_credit": Call.GRANT_CREDIT,
    "revoke_credit": Call.REVOKE_CREDIT,
    "send_unsolicited": Call.SEND_UNSOLICITED,
}


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(drops=1, credits=1, unsolicited=1),
        Bounds(drops=0, cancels=1, questions=2, credits=1),
        Bounds(drops=0, failures=1, credits=1),
        Bounds(drops=1, server_restarts=1),
    ],
    ids=["hand-over and a cut", "stopped, and asked again", "the engine fails", "the verifier restarts"],
)
def test_the_model_keeps_to_the_table(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    led: set[tuple[Call | Event, State]] = set()

    def check(event: Call | Event, client: Client, said: Any, next_states: Any) -> Any:
        after = said if isinstance(said, Client) else said[0]
        if after.link != "refused":
            assert state_of(after) in next_states, f"{event} led from {state_of(client)} to {state_of(after)}"
            led.add((event, state_of(client)))
        return said

    def called(function: Any, call: Call) -> Any:
        @functools.wraps(function)
        def made(client: Client, *args: Any) -> Any:
            before = state_of(client)
            sent_again = call is Call.PROPOSE and before is State.PROPOSED  # the model has no other way to do so
            next_states = {State.PROPOSED} if sent_again else CALLS[call].next_states[before]
            return check(Call.RESEND if sent_again else call, client, function(client, *args), next_states)

        return made

    receive = device.receive

    def received(client: Client, frame: Any) -> Any:
        event, before = event_of(frame, client.epoch), state_of(client)
        row = FRAMES[event].get(before)
        return check(event, client, receive(client, frame), {before, *(row.next_states if row else ())})

    for name, call in _MODELLED.items():
        monkeypatch.setattr(device, name, called(getattr(device, name), call))
    monkeypatch.setattr(device, "receive", received)
    explore(bounds)
    assert len(led) > 12
