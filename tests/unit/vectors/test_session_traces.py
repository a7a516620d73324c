"""The recorded sessions: they are replayed, cover all features, and recording is deterministic."""

from __future__ import annotations

import itertools

import pytest

from vectors import trace_files
from vectors.trace_coverage import REQUIRED, features
from vectors.trace_groups import GROUPS, scripted, spelled_out, walks
from vectors.trace_recorder import Trace, recording
from vectors.trace_replay import ReplayError, replay


@pytest.mark.parametrize("group", GROUPS)
def test_python_replays_the_traces(group: str) -> None:
    for trace in trace_files.read(f"session/{group}"):
        replay(trace["name"], trace["steps"])


def test_the_traces_cover_all_features() -> None:
    traces = [trace for group in GROUPS for trace in trace_files.read(f"session/{group}")]
    assert len(traces) >= 500
    assert len({trace["name"] for trace in traces}) == len(traces)
    assert set().union(*(features(trace["steps"]) for trace in traces)) == REQUIRED


def written(traces: list[Trace]) -> str:
    return trace_files.text_of({"name": trace.name, "steps": trace.steps} for trace in traces)


def test_recording_again_brings_the_same() -> None:
    """Some of them; all in a test that takes longer."""
    again = walks(12)
    first = list(itertools.islice(trace_files.read("session/walks"), len(again)))
    assert written(again) == trace_files.text_of(first)
    assert written(scripted()) == trace_files.text_of(trace_files.read("session/scripts"))


@pytest.mark.slow
def test_recording_everything_again_brings_the_same() -> None:
    assert written(walks()) == trace_files.text_of(trace_files.read("session/walks"))
    assert written(spelled_out()) == trace_files.text_of(trace_files.read("session/spelled_out"))


def test_a_difference_is_named() -> None:
    trace = next(trace_files.read("session/scripts"))
    steps = trace["steps"]
    step = next(at for at, step in enumerate(steps) if step.get("frames"))
    changed = [*steps[:step], steps[step] | {"frames": []}, *steps[step + 1 :]]
    with pytest.raises(ReplayError, match=f"step {step}, connect: expected .*hello"):
        replay("a trace", [steps[0], {"call": "connect", "frames": []}])
    with pytest.raises(ReplayError, match=rf"step {step}, "):
        replay("a trace", changed)
    with pytest.raises(ReplayError, match="connection should be 0, is 1"):
        replay("a trace", [steps[0], {"call": "connect"}])


def test_recording_ends() -> None:
    with recording() as recorder:
        pass
    walks(1)
    assert recorder.traces == []
