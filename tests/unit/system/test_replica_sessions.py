"""What the tests of replicas rely on: phases end when they should, and a wrong text is found."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from support.refusals import refused
from support.system import replica_sessions
from support.system.replica_sessions import Phases, Written, different


def test_a_phase_ends_when_every_session_has_finished_an_answer_begun_in_it():
    async def run() -> None:
        phases = Phases(2)
        phases.begin()
        waiting = asyncio.create_task(phases.wait([]))
        for number in (0, 1, 0, 0):  # the first of each may be from before
            phases.answered(number)
        await asyncio.sleep(0)
        assert not waiting.done()
        phases.answered(1)
        await waiting

    asyncio.run(run())


def test_a_session_that_fails_ends_its_phase(monkeypatch):
    async def run() -> None:
        async def fail() -> None:
            raise MoaError("no", code="refused")

        phases = Phases(3)
        phases.begin()
        with refused("refused"):
            await phases.wait([asyncio.create_task(fail())])
        monkeypatch.setattr(replica_sessions, "_LONGEST_PHASE_S", 0.01)
        with pytest.raises(AssertionError, match=r"3 sessions finished no answer within 0.01 s"):
            await phases.wait([])

    asyncio.run(run())


def test_a_wrong_text_is_found_and_each_question_is_decoded_once():
    asked = []

    def decode(prompt: Any, count: int, sampling: Sampling) -> list[int]:
        asked.append((prompt, count, sampling))
        return [len(prompt), sampling.seed]

    right, seeded = Written((1, 2), Sampling(), (2, 0)), Written((1, 2), Sampling(seed=5), (2, 5))
    wrong = Written((1,), Sampling(), (2, 0))
    verifier: Any = SimpleNamespace(decode=decode)
    assert different(verifier, [right, right, seeded, wrong], 9) == [wrong]
    assert len(asked) == 3 and {count for _, count, _ in asked} == {9}
