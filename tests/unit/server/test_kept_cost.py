"""Durations of steps that the server of this machine keeps for its next start."""

from __future__ import annotations

import json

import pytest

from moa_server.scheduling.kept_cost import keep, restore
from moa_server.scheduling.step_cost import StepCost


def learnt() -> StepCost:
    cost = StepCost()
    cost.memory_s = (0.002, 0.0001)
    for tokens in (32, 1, 2, 16, 1, 2, 16):
        cost.observe(tokens, 40 * tokens, 60, 1, 0.02 + 0.004 * tokens + (0.01 if tokens == 2 else 0.0))
    cost.settle()
    return cost


def test_what_was_kept_predicts_the_same(tmp_path):
    before, after, file = learnt(), StepCost(), tmp_path / "new" / "cost.json"
    assert not restore(file, after)
    keep(file, before)
    assert restore(file, after) and after.memory_s == before.memory_s
    for cost in (before, after):
        cost.observe(4, 160, 60, 1, 0.05)  # it goes on learning from there
    for tokens in (1, 2, 7, 30, 200):
        assert after.seconds(tokens, 40, 80, 2) == pytest.approx(before.seconds(tokens, 40, 80, 2))


@pytest.mark.parametrize(
    "changed", [{"weights": [1.0]}, {"ratios": None}, {"seen": ["x"] * 65}, {"memory_s": [1]}, {"weights": [-1.0] * 5}]
)
def test_what_is_no_cost_is_not_taken_up(tmp_path, changed):
    cost, file = StepCost(), tmp_path / "cost.json"
    before = cost.seconds(5, 10, 20, 1)
    file.write_text(json.dumps(learnt().state() | changed))
    assert not restore(file, cost)
    file.write_text("[")
    assert not restore(file, cost) and cost.seconds(5, 10, 20, 1) == before
