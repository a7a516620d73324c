"""The cost model and fixed shapes, on simulated devices, links and targets."""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from dataclasses import replace
from functools import cache

import pytest

from moa_bench.simulated_clock import Pace
from moa_runtime.drafters.base import FREE, Budget
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.draft_controllers import (
    BetaThompson,
    CalibratedThompson,
    Controller,
    FixedShape,
    controller_for,
)
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.options import draft_length_of
from moa_runtime.session.tree import DraftTree
from support.runtime.simulated import Shares, draft_in, expected_rate, hold, prompt_of, rate_of, round_of

PLAIN = Pace(step_s=0.005, query_s=0.0002, pass_s=0.03, token_s=0.0002, round_trip_s=0.03)
FAR = replace(PLAIN, round_trip_s=0.5)
SLOW = replace(PLAIN, step_s=0.02)
HOPELESS = replace(PLAIN, step_s=0.5)
TOKEN_HEAVY = replace(PLAIN, token_s=0.005)
GOOD: Shares = (0.7, 0.15, 0.05)
DOUBTFUL: Shares = (0.3, 0.2, 0.1)
EXCELLENT: Shares = (0.92, 0.03)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def size(pace: Pace, shares: Shares = GOOD) -> tuple[float, float]:
    """Return the mean numbers of tokens and steps of a draft after the controller has learned."""
    ended = hold(CostModel(), pace, shares)[-100:]
    return mean([one.drafted for one in ended]), mean([len(one.steps) for one in ended])


@cache
def fixed_trees(shares: Shares) -> list[DraftTree]:
    trees = [DraftTree()]
    for levels in (1, 2, 3, 4, 6, 8, 12, 16):
        for width in (1, 4, 10):
            sizes = (1, 2, 3, 4, 6, 8, 12, 16, 32, 62)
            trees += [draft_in(Budget.tree(nodes, levels, width), shares) for nodes in sizes]
    return trees


@pytest.mark.parametrize("shares", [GOOD, DOUBTFUL, EXCELLENT], ids=["good", "doubtful", "excellent"])
@pytest.mark.parametrize("pace", [PLAIN, FAR, SLOW, replace(SLOW, step_s=0.05), TOKEN_HEAVY], ids=str)
def test_drafts_become_nearly_as_fast_as_the_best_fixed_shape(pace: Pace, shares: Shares) -> None:
    best = max(expected_rate(tree, pace) for tree in fixed_trees(shares))
    for prompt in (0, 60):
        assert rate_of(hold(CostModel(), pace, shares, prompt=prompt)[50:]) > 0.8 * best  # 150 rounds of chance


def test_drafts_grow_with_the_round_trip_and_shrink_with_costs() -> None:
    (nodes, steps), (far_nodes, far_steps), (_, slow_steps) = size(PLAIN), size(FAR), size(SLOW)
    assert far_nodes > 1.3 * nodes and far_steps > 1.3 * steps
    assert slow_steps < 0.7 * steps and size(TOKEN_HEAVY)[0] < 0.5 * nodes


def test_an_unsure_drafter_makes_shorter_drafts() -> None:
    doubtful, good, excellent = (size(PLAIN, shares)[1] for shares in (DOUBTFUL, GOOD, EXCELLENT))
    assert doubtful < good < excellent
    controller = CostModel()
    hold(controller, PLAIN, GOOD)
    sizes = [len(draft_in(controller.budget(), shares).steps) for shares in (DOUBTFUL, GOOD, EXCELLENT)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_prices_are_times_multiplied_by_tokens_per_second() -> None:
    controller = CostModel()
    rate, prices = rate_of(hold(controller, PLAIN, GOOD)[-20:]), controller.prices
    assert prices.step == pytest.approx(rate * PLAIN.step_s, rel=0.35)
    assert prices.query == pytest.approx(prices.step * PLAIN.query_s / PLAIN.step_s, rel=0.2)
    assert prices.node == pytest.approx(prices.step * PLAIN.token_s / PLAIN.step_s, rel=0.4)


def test_the_first_prompt_gives_the_first_prices() -> None:
    controllers = CostModel(), CostModel(), CostModel()
    assert controllers[0].prices == replace(FREE, follows=controllers[0].prices.follows)
    for controller, pace in zip(controllers, (PLAIN, FAR, TOKEN_HEAVY), strict=True):
        controller.observe(prompt_of(60, pace))
    plain, far, feeling = (controller.prices for controller in controllers)
    assert 0 < far.step < plain.step and plain.node < feeling.node
    controllers[0].observe(prompt_of(900, FAR))
    assert controllers[0].prices == plain


def test_a_step_that_reads_a_prompt_does_not_count() -> None:
    """The first draft of an answer takes half a second longer, because the device reads the question."""
    read, unread = CostModel(), CostModel()
    slowly, quickly = (
        hold(controller, PLAIN, GOOD, reading_s=reading_s) for controller, reading_s in ((read, 0.5), (unread, 0.0))
    )
    assert slowly[0].draft_s > 0.5
    assert rate_of(slowly[1:]) == pytest.approx(rate_of(quickly[1:]), rel=0.15)


def drafted_rounds(controller: Controller, pace: Pace, rounds: int) -> list[int]:
    """Return the rounds in which the model may take steps."""
    rng, drafted = random.Random(4), []
    for number in range(rounds):
        budget = controller.budget()
        if budget.levels:
            drafted.append(number)
        controller.observe(round_of(draft_in(budget, GOOD), pace, GOOD, rng))
    return drafted


@pytest.mark.parametrize("pace", [HOPELESS, replace(PLAIN, pass_s=0.001, round_trip_s=0.0)], ids=str)
def test_tries_take_two_hundredths_of_the_time_if_no_step_pays(pace: Pace) -> None:
    controller = CostModel()
    ended = hold(controller, pace, GOOD, 2000)[500:]
    drafting, waiting = sum(one.draft_s for one in ended), sum(one.waited_s for one in ended)
    assert 0.01 < drafting / (drafting + waiting) < 0.025
    assert {len(one.steps) for one in ended} == {0, 1}
    idle = next(budget for budget in (controller.budget(), controller.budget()) if not budget.levels)
    assert idle.nodes == 62  # of copies


def test_the_first_drafts_are_tries_even_with_a_fast_target() -> None:
    """Until the model takes a step, its steps may cost nothing."""
    instant = Pace(step_s=0.005, query_s=0.0, pass_s=0.001, token_s=0.0, round_trip_s=0.0)
    controller = CostModel()
    controller.observe(prompt_of(60, instant))
    for _ in range(3):
        assert controller.budget().levels == 16
        controller.observe(RoundEnded(0, 2, 2, 2, (), 0.0, 0.001, 0.001))
    assert len(drafted_rounds(controller, instant, 100)) < 12


def test_a_device_that_becomes_fast_again_drafts_again() -> None:
    controller = CostModel()
    drafted_rounds(controller, HOPELESS, 100)
    assert len(drafted_rounds(controller, PLAIN, 600)) > 100


def test_a_draft_is_never_larger_than_its_limits() -> None:
    controller = CostModel(nodes=9, levels=3, width=2)
    ended = hold(controller, FAR, EXCELLENT, 100)
    assert max(one.drafted for one in ended) <= 9 and max(one.depth for one in ended) == 3
    assert max(max(one.steps) for one in ended) == 2
    widest = controller.budget()
    assert (widest.nodes, widest.levels, widest.width, widest.branches) == (9, 3, 2, True)


def test_rounds_of_no_time_change_no_price() -> None:
    """A draft of copies takes no step, and an answer may arrive in the same moment."""
    controller = CostModel()
    follows = controller.prices.follows
    controller.observe(RoundEnded(0, 8, 8, 8, (), 0.0, 0.0, 0.0))
    assert controller.prices == replace(FREE, follows=follows) and controller.budget().levels == 16


def test_tokens_are_drafted_ahead_while_they_pay() -> None:
    near, far = CostModel(), CostModel()
    hold(near, SLOW, GOOD)
    hold(far, FAR, GOOD)
    assert far.ahead(0, 0.5) and not near.ahead(0, 0.01)
    for controller in (near, far):
        wanted = [controller.ahead(0, probability) for probability in (1e-6, 0.01, 0.1, 0.3, 1.0)]
        assert wanted == sorted(wanted) and not wanted[0] and wanted[-1]
    assert [far.ahead(drafted, 1.0) for drafted in (0, 7, 8)] == [True, True, False]


def test_a_fixed_shape_is_fixed() -> None:
    for shape in (Budget.chain(3), Budget.tree(20, 4, 3)):
        fixed = FixedShape(shape)
        fixed.observe(RoundEnded(0, 3, 3, 0, (1, 1, 1), 9.0, 0.001, 0.001))
        assert fixed.budget() == shape and not fixed.ahead(0, 1.0)
    assert FixedShape().budget() == Budget.chain(6)
    assert [FixedShape(lookahead=2).ahead(drafted, 0.0) for drafted in (0, 1, 2)] == [True, True, False]


def test_a_command_line_names_a_draft_length() -> None:
    assert isinstance(controller_for(draft_length_of("auto")), CostModel)
    assert controller_for(draft_length_of("4")) == FixedShape(Budget.chain(4))
    assert isinstance(controller_for(draft_length_of("thompson")), BetaThompson)
    assert isinstance(controller_for(draft_length_of("thompson-calibrated")), CalibratedThompson)
    with pytest.raises(ArgumentTypeError, match="thompson-calibrated"):
        draft_length_of("many")
