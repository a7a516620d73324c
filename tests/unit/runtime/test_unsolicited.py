"""Drafts made while the server streams: how deep they are, and the rounds that they would have made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafting.unsolicited import Pace, UnsolicitedDrafts
from moa_runtime.session.tree import DraftTree

USUAL = Budget.tree(62, 4, 10)
PACE = Pace(tokens=1.0, interval_s=0.010, round_trip_s=0.001)


def drafts(level_s: float | None) -> UnsolicitedDrafts:
    """Return drafts whose levels take ``level_s``; None if only one was made, which also reads the prompt."""
    one = UnsolicitedDrafts()
    for _ in range(1 if level_s is None else 2):
        one.begin(9, DraftTree.chain([1, 2], [-0.1, -0.1], (1, 1)), 2 * (level_s or 0.0), USUAL)
    return one


@pytest.mark.parametrize(
    ("level_s", "pace", "levels"),
    [
        (0.001, PACE, 5),  # all in time
        (0.002, PACE, 4),  # as many as are in time
        (0.001, replace(PACE, tokens=2.5), 7),
        (0.001, replace(PACE, round_trip_s=0.0245), 4),  # for the third pass
        (0.001, replace(PACE, round_trip_s=0.3), 0),  # never
        (0.012, PACE, 0),  # the server is faster than the model
    ],
)
def test_a_draft_is_deeper_by_the_lead_and_in_time(level_s: float | None, pace: Pace, levels: int) -> None:
    budget = drafts(level_s).budget(USUAL, pace)
    assert budget == replace(USUAL, levels=levels)


@pytest.mark.parametrize("one", [UnsolicitedDrafts(), drafts(None)], ids=["no draft", "one that read the prompt"])
def test_a_model_that_was_not_timed_drafts_one_token(one: UnsolicitedDrafts) -> None:
    assert one.budget(USUAL, PACE) == replace(USUAL, nodes=1, levels=1)
    none = replace(USUAL, nodes=0, levels=0)
    assert one.budget(none, PACE) == none


def test_the_first_times_of_a_level_count_alike() -> None:
    """Wider levels than the first draft's take longer."""
    one = drafts(0.001)
    one.begin(9, DraftTree.chain([1], [-0.1], (10,)), 0.012, USUAL)
    assert one.budget(USUAL, replace(PACE, interval_s=0.03)).levels == 4  # of 6.5 ms


def test_parts_are_priced_as_if_the_lead_were_right() -> None:
    usual = replace(USUAL, prices=Prices(0.2, 0.05, 0.1, follows=0.5))
    prices = drafts(0.001).budget(usual, replace(PACE, tokens=2.0)).prices
    assert prices == Prices(0.05, 0.0125, 0.025, 0.5)
    assert drafts(0.001).budget(replace(usual, levels=0), PACE) == replace(usual, levels=0)


def test_a_slow_model_is_tried_again() -> None:
    one, tries = drafts(0.02), 0
    while not one.budget(USUAL, PACE).levels:
        one.begin(9, DraftTree(), 0.0, USUAL)
        tries += 1
    assert 20 < tries < 100


def test_the_text_decides_drafts_in_any_order() -> None:
    one = drafts(0.001)
    one.decided([0] * 20, 0.0, 0.0)
    tree = DraftTree((5, 6, 7), (0, 0, 2), (-0.1, -2.0, -2.1), (1, 2))  # 5 or 6, and 7 after 6
    one.begin(2, tree, 0.1, USUAL)
    one.begin(3, DraftTree((7,), (0,), (-0.1,), (1,)), 0.1, USUAL)
    assert one.next == 4
    assert not one.decided([1, 2], 0.03, 0.001) and not one.decided([1, 2, 6], 0.03, 0.001)
    shorter, longer = one.decided([1, 2, 6, 7, 8], 0.03, 0.001)
    assert (shorter.drafted, shorter.depth, shorter.accepted, shorter.compute_s) == (3, 2, 2, None)
    assert shorter.waited_s == pytest.approx(0.033) and longer.accepted == 1
    assert not one.decided([1, 2, 6, 7, 8, 9], 0.03, 0.001)
    one.begin(5, tree, 0.1, USUAL)
    one.forget()
    assert not one.next and not one.decided([1, 2, 3, 4, 5, 6], 0.03, 0.001)


def test_the_round_is_that_of_the_part_that_would_have_been_asked_for() -> None:
    """A draft is deeper than that of a round, and its cheaper nodes would not have been sent."""
    one = drafts(0.001)
    one.decided([0] * 20, 0.0, 0.0)
    usual = replace(USUAL, prices=Prices(step=0.3, node=0.2))
    half = math.log(0.5)
    tree = DraftTree((1, 2, 3, 4), (0, 1, 2, 0), (half, 2 * half, 3 * half, 3 * half), (1, 1, 1))
    one.begin(20, tree, 0.03, usual)
    (ended,) = one.decided([0] * 20 + [1, 2, 3, 9], 0.03, 0.0)
    assert (ended.drafted, ended.depth, ended.accepted, ended.steps) == (2, 2, 2, (1, 1))
    assert ended.draft_s == pytest.approx(0.02)
