"""The documents show the tables, the faults and the close codes of the code."""

from __future__ import annotations

import re

from moa_runtime.session import client_table as client
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.connection import FAILED, GOING_AWAY, NORMAL, REFUSED, TRY_AGAIN_LATER
from support.session.protocol_tables import PAGE, written


def test_the_page_names_every_fault_and_close_code() -> None:
    page = PAGE.read_text()
    faults = page[page.index("## Faults") : page.index("## Resuming")]
    codes = set(re.findall("^[|] `([A-Z_]+)` [|]", faults, re.MULTILINE))
    known = {name.removeprefix("FAULT_CODE_") for name in wire.FaultCode.keys()}  # noqa: SIM118
    assert codes == known - {"UNSPECIFIED"}
    closing = {NORMAL, GOING_AWAY, REFUSED, FAILED, TRY_AGAIN_LATER}
    assert {int(code) for code in re.findall(r"\b1[0-9]{3}\b", faults)} == closing


def test_the_page_shows_the_tables() -> None:
    page = PAGE.read_text()
    assert page == written(page), "write them anew: PYTHONPATH=tests python -m support.session.protocol_tables"


def test_the_page_names_the_calls_that_are_errors() -> None:
    (sentence,) = re.findall(r"^In a state that is not named, (.*?) are an error", PAGE.read_text(), re.MULTILINE)
    assert re.findall("`([a-z_]+)`", sentence) == [call.value for call, rule in client.CALLS.items() if rule.refusal]
