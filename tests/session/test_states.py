"""The client's table: recorded conversations and the model keep to it, each rule occurs, and the pages show it."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from moa_runtime.session.client_states import CALLS, FRAMES, Call, Heard, State
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.refusals import FAILED, GOING_AWAY, NORMAL, REFUSED, TRY_AGAIN_LATER
from session.in_table import Step, watching
from session.model import client as device
from session.model.client import Client
from session.model.explore import explore
from session.model.frames import Rows, Standing, Verdict, Welcome
from session.model.world import Bounds
from session.written_tables import PAGE, written
from vectors import files
from vectors.replaying import replay
from vectors.session_groups import GROUPS


@pytest.fixture(scope="module")
def recorded() -> set[Step]:
    """What the sessions of the vectors do."""
    with watching() as seen:
        for group in GROUPS:
            for trace in files.read(f"session/{group}"):
                replay(trace["name"], trace["steps"])
    return seen


def test_every_call_leads_in_the_traces_wherever_the_table_says(recorded: set[Step]) -> None:
    rules = {
        Step(call, before, after) for call in Call for before in State for after in CALLS[call].leads.get(before, ())
    }
    assert rules - recorded == set()


def test_every_frame_does_in_the_traces_whatever_the_table_says(recorded: set[Step]) -> None:
    rules = {
        Step(heard, before, after) for heard in Heard for before, row in FRAMES[heard].items() for after in row.leads
    }
    assert rules - recorded == set()
    assert {(heard, before) for heard in Heard for before in FRAMES[heard]} <= {step[:2] for step in recorded}


def state_of(client: Client) -> State:
    """Where a client of the model is."""
    if client.link != "up":
        down = client.link == "down"
        if client.limit:
            return State.WRITING if down else State.RETURNING
        return State.DOWN if down else State.GREETING
    if not client.limit:
        return State.IDLE
    awaited = {"standing": State.RECLAIMING, "prompt": State.PROMPTED, "draft": State.PROPOSED}.get(client.awaits)
    return awaited or (State.LENT if client.credit > len(client.known) else State.DRAFTING)


def heard_of(frame: Any, epoch: int) -> Heard:
    if isinstance(frame, Welcome | Rows):
        return Heard.WELCOME if isinstance(frame, Welcome) else Heard.ROWS
    if isinstance(frame, Verdict | Standing):
        known = Heard.VERDICT if isinstance(frame, Verdict) else Heard.STANDING
        return known if frame.epoch == epoch else Heard.STALE
    return Heard.FAULT


_MODELLED = {
    "connect": Call.CONNECT,
    "disconnected": Call.DISCONNECTED,
    "cancel": Call.CANCEL,
    "ask": Call.PROMPT,
    "propose": Call.PROPOSE,
    "lend": Call.LEND,
    "take_over": Call.TAKE_OVER,
}


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(drops=1, lends=1),
        Bounds(drops=0, cancels=1, questions=2, lends=1),
        Bounds(drops=0, failures=1, lends=1),
        Bounds(drops=1, server_restarts=1),
    ],
    ids=["hand-over and a cut", "stopped, and asked again", "the engine fails", "the verifier restarts"],
)
def test_the_model_keeps_to_the_table(bounds: Bounds, monkeypatch: pytest.MonkeyPatch) -> None:
    led: set[tuple[Call | Heard, State]] = set()

    def check(event: Call | Heard, client: Client, said: Any, leads: Any) -> Any:
        after = said if isinstance(said, Client) else said[0]
        if after.link != "refused":
            assert state_of(after) in leads, f"{event} led from {state_of(client)} to {state_of(after)}"
            led.add((event, state_of(client)))
        return said

    def called(function: Any, call: Call) -> Any:
        @functools.wraps(function)
        def made(client: Client, *args: Any) -> Any:
            before = state_of(client)
            sent_again = call is Call.PROPOSE and before is State.PROPOSED  # the model has no other way to do so
            leads = {State.PROPOSED} if sent_again else CALLS[call].leads[before]
            return check(Call.RESEND if sent_again else call, client, function(client, *args), leads)

        return made

    receive = device.receive

    def received(client: Client, frame: Any) -> Any:
        heard, before = heard_of(frame, client.epoch), state_of(client)
        row = FRAMES[heard].get(before)
        return check(heard, client, receive(client, frame), {before, *(row.leads if row else ())})

    for name, call in _MODELLED.items():
        monkeypatch.setattr(device, name, called(getattr(device, name), call))
    monkeypatch.setattr(device, "receive", received)
    explore(bounds)
    assert len(led) > 12


def test_the_wire_s_page_names_every_fault_and_close_code() -> None:
    page = (PAGE.parent / "protocol.md").read_text()
    faults = page[page.index("## Faults") : page.index("## Resuming")]
    codes = set(re.findall("^[|] `([A-Z_]+)` [|]", faults, re.MULTILINE))
    known = {name.removeprefix("FAULT_CODE_") for name in wire.FaultCode.keys()}  # noqa: SIM118
    assert codes == known - {"UNSPECIFIED"}
    closing = {NORMAL, GOING_AWAY, REFUSED, FAILED, TRY_AGAIN_LATER, 1009}
    assert {int(code) for code in re.findall(r"\b1[0-9]{3}\b", faults)} == closing


def test_the_page_shows_the_tables() -> None:
    page = PAGE.read_text()
    assert page == written(page), "write them anew: PYTHONPATH=tests python -m session.written_tables"
