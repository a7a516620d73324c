"""Prices in drafts of the tiny drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import SharedBackend
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.session.tree import DraftTree
from unit.runtime.test_draft_tree import priced

PREFIX = list(range(40, 52))


class Counting(SharedBackend):
    """Counts the nodes that each step continues; the tiny drafter's candidates at a tenth of their doubt, so that
    some are likely."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.queries: list[int] = []

    def step(self, inputs: StepInputs) -> StepResult:
        self.queries.append(len(inputs.queries))
        result = super().step(inputs)
        shares = np.array([0.6, 0.2, 0.1, *[0.001] * (self.top_k - 3)], np.float32)
        return replace(result, top_logprobs=np.tile(np.log(shares), (len(inputs.queries), 1)))


Drafting = Callable[..., tuple[DraftTree, list[int]]]


@pytest.fixture
def drafting(reference: Backend) -> Drafting:
    """Proposes, and says how many nodes each step continued."""

    def propose(shape: Budget, prefix: list[int] = PREFIX, mixture: NgramMixture | None = None):
        backend = Counting(reference)
        drafter = MoaDrafter(backend, max_context=512, mixture=mixture)
        rows = np.random.default_rng(3).standard_normal((2, len(prefix) - 1, *reference.kv_shape))
        drafter.add_rows(0, *rows.astype(np.float32))
        return drafter.propose(prefix, shape), backend.queries

    return propose


def test_a_chain_stops_where_a_level_does_not_pay(drafting: Drafting) -> None:
    """Each token is 0.6 as likely as the one before it."""
    for step, length in ((0.0, 6), (0.3, 3), (0.5, 2), (0.61, 1), (9.0, 1)):
        chain, queries = drafting(priced(Budget.chain(6), step=step))
        assert len(chain.tokens) == chain.depth == length
        assert chain.steps == tuple(queries) == (1,) * length
        assert np.exp(chain.scores) == pytest.approx([0.6**level for level in range(1, length + 1)])
    assert len(drafting(priced(Budget.chain(6), math.log(0.5), step=0.2))[0].tokens) == 2
    assert len(drafting(priced(Budget.chain(6), query=0.2, node=0.1))[0].tokens) == 3


def test_a_tree_continues_what_pays_and_counts_it(drafting: Drafting) -> None:
    """Of 0.6, 0.2 and 0.1 the first two; behind them 0.36 alone, and then 0.216, for 0.12 does not."""
    tree, queries = drafting(priced(Budget.tree(nodes=60, levels=4, width=5), query=0.15))
    assert tree.steps == tuple(queries) == (1, 2, 1, 1)
    assert drafting(Budget.tree(nodes=60, levels=4, width=5))[1] == [1, 5, 5, 5]
    flat, queries = drafting(priced(Budget.tree(nodes=60, levels=4, width=5), step=0.95))
    assert flat.steps == tuple(queries) == (1,) and flat.depth == 1


def test_nodes_below_their_price_are_not_sent_but_one_always_is(drafting: Drafting) -> None:
    shape = Budget.tree(nodes=60, levels=3, width=5)
    whole, _ = drafting(shape)
    worth, _ = drafting(priced(shape, node=0.05))
    assert len(whole.tokens) == 60 > len(worth.tokens) > 3
    assert all(np.exp(worth.scores) >= 0.05) and np.exp(whole.scores).min() < 0.05
    assert sorted(worth.scores) == sorted(score for score in whole.scores if score >= math.log(0.05))
    for levels in (1, 3):
        one, _ = drafting(priced(replace(shape, levels=levels), node=0.7))
        assert len(one.tokens) == 1 and np.exp(one.scores) == pytest.approx([0.6])


def test_copies_that_are_not_worth_sending_end_a_chain(drafting: Drafting) -> None:
    text = [*range(40, 80), *range(40, 58)]
    lengths = []
    for node in (0.0, 0.3, 0.6, 0.95):
        chain, queries = drafting(priced(Budget.chain(0), node=node), text, NgramMixture())
        assert queries == [] and chain.steps == ()
        assert list(chain.tokens) == [40 + (18 + at) % 40 for at in range(len(chain.tokens))]  # from 79 back to 40
        assert all(np.exp(chain.scores) >= max(node, 0.1))
        lengths.append(len(chain.tokens))
    assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == 0


def test_without_levels_there_are_only_copies(drafting: Drafting) -> None:
    text = [*range(40, 80), *range(40, 58)]
    for shape in (Budget.tree(levels=0), Budget.chain(0)):
        copied, queries = drafting(shape, text, NgramMixture())
        assert queries == [] and copied.steps == () and copied.parents == tuple(range(len(copied.tokens)))
        assert len(copied.tokens) > 5
        assert drafting(shape, text) == (DraftTree(), [])
        assert drafting(shape, PREFIX, NgramMixture()) == (DraftTree(), [])
