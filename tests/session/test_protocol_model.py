"""Protocol 2 before it is written: every state that can be reached is right, and can come to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from session.model import client as device
from session.model import server as verifier
from session.model.client import Client, WrongError
from session.model.explore import FoundError, explore
from session.model.frames import Credit, Rows, Standing
from session.model.server import Session
from session.model.world import Bounds

SMALL = {
    "cuts": Bounds(drops=1, answer=3),
    "nothing is written while away": Bounds(drops=2, while_away=False),
    "the server drafts": Bounds(drops=0, lends=2, answer=3),
    "hand-over and a cut": Bounds(drops=1, lends=1),
    "the verifier restarts": Bounds(drops=1, server_restarts=1),
    "the program restarts": Bounds(drops=0, client_restarts=1),
    "the engine fails": Bounds(drops=0, failures=2, lends=1),
    "stopped, and asked again": Bounds(drops=0, cancels=1, questions=2, lends=1),
}
LARGE = {
    "cuts": Bounds(drops=2, answer=3),
    "hand-overs and cuts": Bounds(drops=2, lends=2, answer=3),
    "both ends restart": Bounds(drops=1, server_restarts=1, client_restarts=1),
    "the engine fails": Bounds(drops=1, failures=1, lends=2, answer=3),
    "stopped, and asked again": Bounds(drops=2, cancels=1, questions=2),
    "everything once": Bounds(drops=1, server_restarts=1, cancels=1, questions=2, lends=1),
}


@pytest.mark.parametrize("bounds", SMALL.values(), ids=SMALL)
def test_every_state_is_right_and_comes_to_its_end(bounds: Bounds) -> None:
    assert explore(bounds).states > 50


@pytest.mark.slow
@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE)
def test_every_state_of_a_larger_world_does(bounds: Bounds) -> None:
    assert explore(bounds).states > 10_000


RESTORED = Bounds(drops=1, client_restarts=1)
SILENT = Bounds(drops=0, lends=1, answer=3)


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
        explore(Bounds(drops=0, cancels=1, questions=2, lends=1))


def test_the_explorer_finds_a_hand_over_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    credit = verifier._credit

    def silent(session: Session, frame: Credit) -> verifier.Answered:
        session, out = credit(session, frame)
        return session, tuple(frame for frame in out if not isinstance(frame, Standing))

    monkeypatch.setattr(verifier, "_credit", silent)
    with pytest.raises(FoundError, match="nothing happens any more"):
        explore(SILENT)


def test_the_explorer_finds_a_verdict_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that drafts before the server stands."""
    over = device.take_over
    monkeypatch.setattr(device, "take_over", lambda client: (over(client)[0]._replace(awaits=""), over(client)[1]))
    with pytest.raises(FoundError, match="nobody asked for"):
        explore(SILENT)


def test_the_explorer_finds_text_that_was_never_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written for a device that seemed to be away."""
    credit = verifier._credit
    monkeypatch.setattr(
        verifier, "_credit", lambda session, frame: credit(session._replace(told=len(session.committed)), frame)
    )
    with pytest.raises(FoundError, match="nothing happens any more"):
        explore(SILENT)


def uncut(taken: Callable[[Client, Rows], Client], client: Client, frame: Rows) -> Client:
    """Takes up rows as if no epoch had begun since."""
    try:
        return taken(client._replace(cuts=()), frame)._replace(cuts=client.cuts)
    except WrongError:
        return client
