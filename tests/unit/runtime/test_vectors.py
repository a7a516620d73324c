"""The recorded vectors: Python does as they say, and they cover the tables and the names of the protocol."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import get_args

import pytest

from moa_runtime.drafting.events import LoopEvent
from moa_runtime.events import LinkStatus, PauseReason
from moa_runtime.session.client_table import CALLS, FRAMES, Call, Event, State
from moa_runtime.session.events import Cause, Origin, Policy, SessionEvent
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from vectors import trace_files
from vectors.figures import figures_of
from vectors.loop_replay import alike, replay_loop
from vectors.texts import texts
from vectors.trace_replay import Seen, play, replay

SESSIONS = ("session/walks", "session/spelled_out", "session/scripts")


def missing(groups: Iterable[str], names: Iterable[str], kinds: Iterable[type[enum.Enum]]) -> set[str]:
    """Return the names, and the values of enums, that no trace of the groups has."""
    text = "".join(trace_files.text_of(trace_files.read(group)) for group in groups)
    values = {str(member.value) for kind in kinds for member in kind}
    return {name for name in {*names, *values} if f'"{name}"' not in text}


def test_sessions_do_as_recorded_and_as_their_table_says() -> None:
    seen: set[Seen] = set()
    for group in SESSIONS:
        for trace in trace_files.read(group):
            replay(trace["name"], trace["steps"], seen)
    for what, before, after in seen:
        rules = CALLS[what].next_states if isinstance(what, Call) else FRAMES[what]
        rule = rules.get(before, frozenset())
        assert after in {before, *getattr(rule, "next_states", rule)}, (what, before, after)
    calls = {(call, before, after) for call in Call for before, to in CALLS[call].next_states.items() for after in to}
    events = {
        (event, before, after) for event in Event for before, t in FRAMES[event].items() for after in t.next_states
    }
    assert calls | events <= seen
    assert {(event, state) for event in Event for state in State} <= {(what, before) for what, before, _ in seen}


def test_loops_do_as_recorded() -> None:
    for trace in trace_files.read("loop/walks"):
        replay_loop(trace["name"], trace["steps"])


@pytest.mark.parametrize("folder", ["figures", "texts"])
def test_figures_and_texts_are_as_recorded(folder: str) -> None:
    for name, cases in (figures_of() if folder == "figures" else texts()).items():
        recorded = list(trace_files.read(f"{folder}/{name}"))
        assert len(recorded) == len(cases)
        for number, (case, expected) in enumerate(zip(cases, recorded, strict=True)):
            assert alike(case, expected), f"{name}, case {number}: expected {expected}, got {case}"


def test_the_vectors_have_all_codes_and_events() -> None:
    wired = {*wire.FaultCode.keys()[1:], *wire.Finish.keys()[1:], *wire.RowEncoding.keys()[1:]}
    session, loop = ({kind.__name__ for kind in get_args(union)} for union in (SessionEvent, LoopEvent))
    assert not missing(SESSIONS, wired | session, (Policy, Origin, Cause))
    assert not missing(["loop/walks"], loop, (PauseReason, LinkStatus))


def test_the_selected_side_changes_in_the_figures() -> None:
    """Both ways, and again after pauses."""
    cases = list(trace_files.read("figures/placements"))
    turns = [sum(a[1][0] != b[1][0] for a, b in zip(case["told"], case["told"][1:], strict=False)) for case in cases]
    trials = [told[1][1] for case in cases for told in case["told"]]
    assert sum(turn >= 2 for turn in turns) >= 10 and 0.05 < sum(trials) / len(trials) < 0.95


def test_a_difference_is_found() -> None:
    create, connect, *_ = next(trace_files.read("session/scripts"))["steps"]
    with pytest.raises(AssertionError, match="a trace, step 1"):
        replay("a trace", [create, connect | {"frames": []}])
    with pytest.raises(AssertionError, match="a trace, step 1"):
        replay("a trace", [create, {"call": "connect"}])
    assert [*play([create, {"call": "connect", "frames": []}])] == [create, connect]
    first, second, *_ = next(trace_files.read("loop/walks"))["steps"]
    with pytest.raises(AssertionError, match="a trace, step 1"):
        replay_loop("a trace", [first, second | {"events": []}])
