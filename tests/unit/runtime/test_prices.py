"""What prices make of drafts: by hand, and on a real drafter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moa_runtime.drafters.base import Budget, Prices

LEVEL = [math.log(share) for share in (0.5, 0.3, 0.1)]


def priced(shape: Budget, logprob: float = 0.0, **prices: float) -> Budget:
    return replace(shape, prices=Prices(**prices), logprob=logprob)


@pytest.mark.parametrize(
    ("prices", "continued"),
    [
        ({}, 3),
        ({"query": 0.2}, 2),
        ({"node": 0.2}, 2),
        ({"query": 0.1, "node": 0.1}, 2),
        ({"query": 0.2, "node": 0.2}, 1),
        ({"query": 0.6}, 0),
        ({"step": 0.89}, 3),
        ({"step": 0.91}, 0),
        ({"step": 0.35, "query": 0.2}, 2),  # 0.3 and 0.1 are gained
        ({"step": 0.45, "query": 0.2}, 0),
        ({"follows": 0.5, "query": 0.2}, 1),
        ({"follows": 0.5, "step": 0.5}, 0),
    ],
)
def test_a_step_is_taken_for_the_nodes_that_gain_if_together_they_pay_for_it(prices, continued: int) -> None:
    assert priced(Budget.tree(), **prices).continued(LEVEL) == continued


def test_a_step_continues_no_more_than_the_width_and_pays_by_these_alone() -> None:
    assert Budget.tree(width=2).continued(LEVEL) == 2
    assert priced(Budget.tree(width=2), step=0.85).continued(LEVEL) == 0
    assert Budget.tree().continued([]) == 0
    assert Budget.chain(4).continued([LEVEL[2]]) == 1


def test_what_a_draft_stands_behind_makes_all_of_it_less_likely() -> None:
    behind = priced(Budget.tree(), math.log(0.5), query=0.2)
    assert behind.continued(LEVEL) == 1
    assert priced(Budget.tree(), math.log(0.5), step=0.5).continued(LEVEL) == 0
    sent = [logprob for logprob in LEVEL if priced(Budget.tree(), math.log(0.5), node=0.14).sends(logprob)]
    assert sent == LEVEL[:2]


def test_a_node_is_sent_where_it_is_as_likely_as_its_price() -> None:
    assert [priced(Budget.tree(), node=0.2).sends(logprob) for logprob in LEVEL] == [True, True, False]
    assert all(Budget.tree().sends(logprob) for logprob in (*LEVEL, -1e9))
