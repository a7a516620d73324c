"""The recorded drafting loops: they are replayed, cover all features, and recording is deterministic."""

from __future__ import annotations

import json

import pytest

from vectors import trace_files
from vectors.loop_coverage import REQUIRED_OF_LOOPS, features_of_loop
from vectors.loop_recorder import loop_walks
from vectors.loop_replay import alike, replay_loop


def test_python_does_what_the_loops_say() -> None:
    for trace in trace_files.read("loop/walks"):
        replay_loop(trace["name"], trace["steps"])


def test_the_loops_cover_all_features() -> None:
    assert (
        set().union(*(features_of_loop(trace["steps"]) for trace in trace_files.read("loop/walks")))
        == REQUIRED_OF_LOOPS
    )


def test_writing_loops_again_brings_the_same() -> None:
    """But for the last bits of logarithms, which another machine may compute otherwise."""
    assert alike(json.loads(json.dumps(loop_walks())), list(trace_files.read("loop/walks")))


def test_what_a_loop_does_otherwise_is_named() -> None:
    steps = next(trace_files.read("loop/walks"))["steps"]
    with pytest.raises(AssertionError, match="a trace, step 1, connecting: expected"):
        replay_loop("a trace", [steps[0], steps[1] | {"events": []}])
