"""What takes the target's time from others costs them, too: prices where conversations share it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moa_bench.simulated_clock import Pace
from moa_runtime.drafters.base import Prices
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.events import Pushed
from support.runtime.simulated import Shares, draft_in, hold, prompt_of, round_of

PACE = Pace(step_s=0.005, query_s=0.0002, pass_s=0.03, token_s=0.005, round_trip_s=0.03)
GOOD: Shares = (0.7, 0.15, 0.05)
DOUBTFUL: Shares = (0.3, 0.2, 0.1)
EXCELLENT: Shares = (0.92, 0.03)


def shared_by(controller: CostModel, conversations: int) -> CostModel:
    """The controller, once it has heard that; it learns nothing else."""
    controller.observe(Pushed(0, 0, 0.0, 0.0, conversations))
    return controller


@pytest.mark.parametrize(("shared_steps", "of_steps"), [(False, 1), (True, 8)])
def test_what_makes_others_wait_costs_so_many_times_as_much(shared_steps: bool, of_steps: int) -> None:
    controller = CostModel(shared_steps=shared_steps)
    hold(controller, PACE, GOOD)
    alone, other = controller.prices, controller.sibling()
    expected = Prices(of_steps * alone.step, of_steps * alone.query, 8 * alone.node, alone.follows)
    assert shared_by(controller, 8).prices == expected
    assert shared_by(other, 8).prices.step == pytest.approx(expected.step)


def test_the_more_conversations_share_the_target_the_smaller_are_drafts_and_at_last_there_are_none() -> None:
    controller = CostModel()
    hold(controller, PACE, GOOD)
    counts = (1, 2, 4, 100, 2**32 - 1)
    sizes = [len(draft_in(shared_by(controller, count).budget(), GOOD).tokens) for count in counts]
    assert sizes[0] > sizes[1] > sizes[2] > 0 == sizes[3] == sizes[4]
    assert not controller.ahead(0, 1.0)
    assert len(draft_in(shared_by(controller, 1).budget(), GOOD).tokens) == sizes[0]


def rate_together(told: int, pace: Pace, conversations: int = 8) -> float:
    """Tokens a second of conversations whose drafts one pass verifies, once they know their target; each is told that
    so many share it. How sure their drafters are differs from draft to draft."""
    controllers, rng, tokens, seconds = [CostModel() for _ in range(conversations)], random.Random(1), 0, 0.0
    for controller in controllers:
        controller.observe(replace(prompt_of(60, pace), sharing=told))
    for number in range(150):
        shares = [rng.choice((GOOD, DOUBTFUL, EXCELLENT)) for _ in controllers]
        trees = [draft_in(controller.budget(), each) for controller, each in zip(controllers, shares, strict=True)]
        compute_s = pace.compute_s(sum(1 + len(tree.tokens) for tree in trees))
        drafts_s = max(pace.draft_s(tree) for tree in trees)
        for controller, tree, each in zip(controllers, trees, shares, strict=True):
            waited_s = pace.round_trip_s + compute_s
            outcome = replace(round_of(tree, pace, each, rng), waited_s=waited_s, compute_s=compute_s, sharing=told)
            controller.observe(outcome)
            tokens += outcome.accepted + 1 if number >= 50 else 0
        seconds += drafts_s + pace.round_trip_s + compute_s if number >= 50 else 0.0
    return tokens / seconds


def test_conversations_that_know_of_each_other_get_more_tokens_together() -> None:
    pace = Pace(step_s=0.004, query_s=0.0002, pass_s=0.04, token_s=0.001, round_trip_s=0.01)
    without = 8 / (pace.round_trip_s + pace.compute_s(8))
    assert rate_together(8, pace) > 1.05 * max(without, rate_together(1, pace))
