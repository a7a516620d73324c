"""The traces of client sessions, made: random walks, the spelled-out tests, and scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vectors.trace_recorder import Recorder, Trace, recording
from vectors.trace_scripts import SCRIPTS
from vectors.trace_state_scripts import STATE_SCRIPTS
from vectors.trace_walks import walk

WALKS = 300
_TESTS = ("test_session.py", "test_credit.py", "test_snapshot.py", "test_hostile_verifier.py")
#: JSON does not tell 1.0 from 1, so a reader in another language need not.
_NOT_SAID = ("not 1\\\\.0",)


class _Names:
    """A plugin of pytest: traces have the names of their tests."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(word in item.nodeid for word in _NOT_SAID)]

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._recorder.name = f"{item.path.stem}: {item.name}"


def walks(count: int = WALKS) -> list[Trace]:
    """Record the first random walks."""
    with recording() as recorder:
        for seed in range(count):
            recorder.name = f"walk {seed}"
            walk(seed)
    return recorder.traces


def spelled_out() -> list[Trace]:
    """Record the tests of single steps.

    Raises:
        RuntimeError: one of them fails.
    """
    folder = Path(__file__).parents[1] / "unit" / "session"
    with recording() as recorder:
        files = [str(folder / name) for name in _TESTS]
        status = pytest.main(["-q", "--noconftest", "-p", "no:cacheprovider", *files], plugins=[_Names(recorder)])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests of the session fail: {status}")
    return [trace for trace in recorder.traces if len(trace.steps) > 1 or "raises" in trace.steps[0]]


def scripted() -> list[Trace]:
    """Record the scripts, which cover what no test does."""
    with recording() as recorder:
        for script in (*SCRIPTS, *STATE_SCRIPTS):
            recorder.name = script.__name__.replace("_", " ")
            script()
    return recorder.traces


GROUPS = {"walks": walks, "spelled_out": spelled_out, "scripts": scripted}
