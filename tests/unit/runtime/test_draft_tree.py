"""Draft trees and budgets, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moa_runtime.drafters.base import Budget, DraftToken, Prices
from moa_runtime.session.tree import DraftTree, check_parents
from support.drafted import path_of


def guesses(*shares: tuple[int, float]) -> list[DraftToken]:
    return [DraftToken(token, math.log(share)) for token, share in shares]


def test_a_tree_follows_a_chain() -> None:
    tree = DraftTree((5, 6, 7), (0, 1, 1), (-0.5, -1.0, -2.0), (1, 2))
    whole = tree.prepended([3, 4], [-0.125, -0.25])
    assert whole.tokens == (3, 4, 5, 6, 7) and whole.parents == (0, 1, 2, 3, 3)
    assert whole.scores == (-0.125, -0.375, -0.875, -1.375, -2.375)
    assert whole.steps == (1, 2) and whole.depth == 4 and path_of(whole) == [3, 4, 5, 6]
    assert check_parents(whole.parents, 5) == list(whole.parents)
    assert tree.prepended([], []) == tree
    assert DraftTree(steps=(1,)).prepended([3], [-0.5]) == DraftTree.chain([3], [-0.5], [1])


LEVEL = [math.log(share) for share in (0.5, 0.3, 0.1)]


def priced(shape: Budget, logprob: float = 0.0, **prices: float) -> Budget:
    return replace(shape, prices=Prices(**prices), logprob=logprob)


@pytest.mark.parametrize(
    ("prices", "continued"),
    [
        ({}, 3),
        ({"query": 0.1, "node": 0.1}, 2),
        ({"step": 0.89}, 3),
        ({"step": 0.91}, 0),
        ({"step": 0.35, "query": 0.2}, 2),  # 0.3 and 0.1 are gained
        ({"step": 0.45, "query": 0.2}, 0),
        ({"follows": 0.5, "query": 0.2}, 1),
        ({"follows": 0.5, "step": 0.5}, 0),
    ],
)
def test_a_step_continues_the_nodes_that_gain_if_they_pay_for_it(prices, continued: int) -> None:
    assert priced(Budget.tree(), **prices).continued(LEVEL) == continued


def test_a_step_continues_at_most_the_width() -> None:
    assert Budget.tree(width=2).continued(LEVEL) == 2
    assert priced(Budget.tree(width=2), step=0.85).continued(LEVEL) == 0
    assert Budget.tree().continued([]) == 0
    assert Budget.chain(4).continued([LEVEL[2]]) == 1


def test_tentative_tokens_make_a_draft_less_likely() -> None:
    behind = priced(Budget.tree(), math.log(0.5), query=0.2)
    assert behind.continued(LEVEL) == 1
    assert priced(Budget.tree(), math.log(0.5), step=0.5).continued(LEVEL) == 0
    sent = [logprob for logprob in LEVEL if priced(Budget.tree(), math.log(0.5), node=0.14).sends(logprob)]
    assert sent == LEVEL[:2]
