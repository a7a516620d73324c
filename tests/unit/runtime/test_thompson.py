"""Draft lengths by Thompson sampling, with simulated drafters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from moa_bench.simulated_clock import Pace
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import BetaThompson, CalibratedThompson, Controller, FixedShape
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.tree import DraftTree
from support.runtime.simulated import prompt_of, rate_of

#: Probability that the next drafted token is right, and the drafter's own estimate.
Text = Callable[[random.Random], tuple[float, float]]

NEAR = Pace(step_s=0.008, query_s=0.0, pass_s=0.02, token_s=0.00005, round_trip_s=0.05)
FAR = Pace(step_s=0.008, query_s=0.0, pass_s=0.02, token_s=0.00005, round_trip_s=0.15)


def steady(right: float) -> Text:
    return lambda rng: (right, right)


def mixed(rng: random.Random) -> tuple[float, float]:
    """Text that is easy or hard, with a drafter that knows which."""
    right = rng.choice((0.95, 0.95, 0.2))
    return right, right


def boasting(rng: random.Random) -> tuple[float, float]:
    """A drafter that is sure and wrong half of the time."""
    return 0.5, 0.92


def hold(controller: Controller, text: Text, rounds: int, pace: Pace = NEAR, seed: int = 1) -> list[RoundEnded]:
    """Run rounds with chains that a drafter makes for such text."""
    controller.observe(prompt_of(60, pace))
    rng, ended = random.Random(seed), list[RoundEnded]()
    for _ in range(rounds):
        budget, logprobs, accepted, right = controller.budget(), list[float](), 0, True
        while len(logprobs) < budget.levels and (not logprobs or budget.continued([sum(logprobs)])):
            chance, claim = text(rng)
            logprobs.append(math.log(claim))
            right = right and rng.random() < chance
            accepted += right
        tree = DraftTree.chain(range(len(logprobs)), logprobs, [1] * len(logprobs))
        compute_s = pace.compute_s(1 + tree.depth)
        times = pace.draft_s(tree), pace.round_trip_s + compute_s, compute_s
        ended.append(
            RoundEnded(0, tree.depth, tree.depth, accepted, tree.steps, *times, scores=tree.likeliest_scores())
        )
        controller.observe(ended[-1])
    return ended


def mean_depth(ended: list[RoundEnded]) -> float:
    return sum(one.depth for one in ended) / len(ended)


def best_fixed(text: Text, pace: Pace) -> float:
    """By brute force."""
    return max(rate_of(hold(FixedShape(Budget.chain(n)), text, 1500, pace)) for n in range(1, 13))


@pytest.mark.parametrize("right", [0.2, 0.5, 0.8])
def test_the_posterior_finds_how_often_a_token_is_right(right):
    controller = BetaThompson()
    ended = hold(controller, steady(right), 1500)
    assert controller.right / (controller.right + controller.wrong) == pytest.approx(right, abs=0.03)
    expected = sum(right**n for n in range(16))  # a geometric length of at most 16
    assert mean_depth(ended[500:]) == pytest.approx(expected, rel=0.1)


def test_only_tokens_that_the_target_judged_count():
    controller = BetaThompson()
    controller._budget = Budget.chain(4)
    controller.observe(RoundEnded(0, 4, 4, 1, (1,) * 4, 0.0, 0.0, 0.0))
    assert (controller.right, controller.wrong) == (2.0, 2.0)
    controller._budget = Budget.chain(4)
    controller.observe(RoundEnded(0, 9, 9, 9, (1,) * 4, 0.0, 0.0, 0.0))  # five of them copies
    assert (controller.right, controller.wrong) == (6.0, 2.0)


@pytest.mark.parametrize("kind", [BetaThompson, CalibratedThompson])
def test_a_length_is_drawn_once_for_each_verdict_and_by_the_seed(kind):
    controller = kind(7)
    budgets = {controller.budget() for _ in range(9)}
    controller.observe(prompt_of(60, NEAR))
    assert budgets == {controller.budget()}
    assert hold(kind(7), mixed, 100) == hold(kind(7), mixed, 100) != hold(kind(8), mixed, 100)
    assert not controller.ahead(0, 1.0) and controller.token_s == 0.0


@pytest.mark.parametrize("pace", [NEAR, FAR], ids=["near", "far"])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.8])
def test_the_rate_is_near_that_of_the_best_fixed_length(right, pace):
    """Only near, because it ignores time: with a long round trip its drafts are too short."""
    for controller in (BetaThompson(), CalibratedThompson()):
        assert rate_of(hold(controller, steady(right), 1500, pace)) > 0.78 * best_fixed(steady(right), pace)


def test_the_calibrated_form_uses_the_drafter_s_probabilities():
    known, counted = (rate_of(hold(controller(), mixed, 1500)) for controller in (CalibratedThompson, BetaThompson))
    assert known > 1.05 * counted and known > best_fixed(mixed, NEAR)


def test_the_calibrated_form_corrects_the_drafter_s_probabilities():
    controller = CalibratedThompson()
    ended = hold(controller, boasting, 1500)
    # It claims 0.92 of one token and 0.85 of two.
    right_of_one, right_of_two = (
        right / (right + wrong) for right, wrong in (controller._bins[9], controller._bins[8])
    )
    assert right_of_one == pytest.approx(0.5, abs=0.05) and right_of_two == pytest.approx(0.25, abs=0.05)
    honest = hold(CalibratedThompson(), steady(0.92), 1500)
    assert mean_depth(honest[-500:]) > 3 * mean_depth(ended[-500:])
