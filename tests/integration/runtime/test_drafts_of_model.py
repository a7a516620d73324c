"""Drafts of the tiny drafter: trees, copies, Gumbel coupling and prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.load import SharedBackend
from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import WEIGHTS, NgramMixture
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, check_parents, depths
from support.drafted import draft_of, path_of

PREFIX = [*range(40, 52)]
REPEATED = [*range(40, 80), *range(40, 58)]
WARM = Sampling(1.0, 1.0, 5)


def drafter_on(
    backend: Backend, text: Sequence[int] = PREFIX, *, max_context: int = 512, mixed: bool = False
) -> MoaDrafter:
    drafter = MoaDrafter(backend, max_context=max_context, mixture=NgramMixture() if mixed else None)
    rows = np.random.default_rng(3).standard_normal((2, len(text) - 1, *backend.kv_shape))
    drafter.add_rows(0, *rows.astype(np.float32))
    return drafter


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the root to a node, its own the last; nodes are counted from 1."""
    return [*path_to(tree, tree.parents[node - 1]), tree.tokens[node - 1]] if node else []


def test_a_tree_s_scores_are_those_of_its_paths(reference: Backend) -> None:
    """Every node, scored along its path in one causal pass."""
    drafter = drafter_on(reference)
    tree = drafter.propose(PREFIX, Budget.tree(nodes=20, levels=4, width=3))
    assert len(tree.tokens) == 20 and check_parents(tree.parents, 20) == list(tree.parents)
    assert max(depths(tree.parents)) <= 4 and tree.depth >= 2
    memory = drafter._memory_of(len(PREFIX))
    nothing = np.zeros((0, *reference.kv_shape), np.float32)
    for node in range(1, 21):
        tokens = [*PREFIX, *path_to(tree, node)]
        result = reference.step(StepInputs.chain(tokens, (nothing, nothing), memory, asked=len(tokens)))
        logprobs = [
            dict(zip(result.top_tokens[at].tolist(), result.top_logprobs[at].tolist(), strict=True))[tokens[at + 1]]
            for at in range(len(PREFIX) - 1, len(tokens) - 1)
        ]
        assert tree.scores[node - 1] == pytest.approx(sum(logprobs), abs=1e-3)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_tree_s_chances_are_those_of_its_nodes_drafted_alone(reference: Backend, mixed: bool) -> None:
    """Each node with the noise of its own position: as the only level of a tree after its path."""
    tree = drafter_on(reference, mixed=mixed).propose(PREFIX, Budget.tree(nodes=20, levels=4, width=3), WARM)
    assert len(tree.tokens) == 20 and max(depths(tree.parents)) >= 2
    for token, score, parent in zip(tree.tokens, tree.scores, tree.parents, strict=True):
        path, before = path_to(tree, parent), tree.scores[parent - 1] if parent else 0.0
        wide = Budget(99, 1, 99, branches=True, tentative=len(path))
        alone = drafter_on(reference, mixed=mixed).propose([*PREFIX, *path], wide, WARM)
        chances = {each: s for each, s, p in zip(alone.tokens, alone.scores, alone.parents, strict=True) if p == 0}
        assert score - before == pytest.approx(chances[token], abs=1e-3)


def test_drafts_follow_the_seed(reference: Backend) -> None:
    drafts = [
        drafter_on(reference).propose(PREFIX, Budget.chain(6), Sampling(1.0, 1.0, seed)).tokens
        for seed in (*range(8), 0)
    ]
    assert drafts[0] == drafts[-1] and len(set(drafts)) > 4


def test_a_chain_after_a_tree_is_what_it_was_before(backend: Backend) -> None:
    drafter = drafter_on(backend)
    before = draft_of(drafter, PREFIX, 4)
    drafter.propose(PREFIX, Budget.tree(nodes=30, levels=3, width=4))
    assert [one.token for one in draft_of(drafter, PREFIX, 4)] == [one.token for one in before]


def test_a_tree_grows_along_what_was_said_before(reference: Backend) -> None:
    """The last five tokens occurred before. What followed then is the likeliest path; the drafter's are beside it."""
    text = [*range(40, 52), *range(40, 48)]
    alone, mixed = (
        drafter_on(reference, text, mixed=mixed).propose(text, Budget.tree(nodes=20, levels=4, width=3))
        for mixed in (False, True)
    )
    assert path_of(mixed)[:3] == [48, 49, 50]
    first = [index for index, parent in enumerate(mixed.parents) if parent == 0]
    assert {mixed.tokens[index] for index in first} - {48} <= set(alone.tokens)
    assert np.exp(mixed.scores[mixed.tokens.index(48)]) >= WEIGHTS[8]
    assert sum(np.exp(mixed.scores[index]) for index in first) <= 1 + 1e-5


def test_a_tree_copies_below_its_last_level_and_stays_within_the_context(reference: Backend) -> None:
    """Without a step for copies."""

    def copied(max_context: int) -> list[int]:
        drafter = drafter_on(reference, REPEATED, max_context=max_context, mixed=True)
        return path_of(drafter.propose(REPEATED, Budget.tree(nodes=20, levels=2, width=3)))

    copies = copied(512)
    assert len(copies) > 8 and copies == [*range(58, 58 + len(copies))]
    assert len(copied(len(REPEATED) + 4)) == 4
    assert drafter_on(reference, max_context=14).propose(PREFIX, Budget.tree(nodes=30, levels=6, width=2)).depth == 2
    assert drafter_on(reference, max_context=12).propose(PREFIX, Budget.tree()).tokens == ()


class Counting(SharedBackend):
    """Counts the nodes that each step continues; three candidates of each are likely."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.queries: list[int] = []

    def step(self, inputs: StepInputs) -> StepResult:
        self.queries.append(len(inputs.queries))
        shares = np.array([0.6, 0.2, 0.1, *[0.001] * (self.top_k - 3)], np.float32)
        return replace(super().step(inputs), top_logprobs=np.tile(np.log(shares), (len(inputs.queries), 1)))


Drafting = Callable[..., tuple[DraftTree, list[int]]]


@pytest.fixture
def drafting(reference: Backend) -> Drafting:
    """Proposes with prices; also returns how many nodes each step continued."""

    def propose(
        shape: Budget, text: Sequence[int] = PREFIX, *, mixed: bool = False, logprob: float = 0.0, **prices: float
    ):
        backend = Counting(reference)
        budget = replace(shape, prices=Prices(**prices), logprob=logprob)
        return drafter_on(backend, text, mixed=mixed).propose(text, budget), backend.queries

    return propose


def test_a_chain_stops_where_a_level_does_not_pay(drafting: Drafting) -> None:
    """Each token is 0.6 as likely as the one before it."""
    for step, length in ((0.0, 6), (0.3, 3), (0.5, 2), (0.61, 1), (9.0, 1)):
        chain, queries = drafting(Budget.chain(6), step=step)
        assert len(chain.tokens) == chain.depth == length
        assert chain.steps == tuple(queries) == (1,) * length
        assert np.exp(chain.scores) == pytest.approx([0.6**level for level in range(1, length + 1)])
    assert len(drafting(Budget.chain(6), logprob=math.log(0.5), step=0.2)[0].tokens) == 2
    assert len(drafting(Budget.chain(6), query=0.2, node=0.1)[0].tokens) == 3


def test_a_tree_continues_what_pays_and_counts_it(drafting: Drafting) -> None:
    """Of 0.6, 0.2 and 0.1 the first two; after them 0.36 alone, and then 0.216, for 0.12 does not."""
    shape = Budget.tree(nodes=60, levels=4, width=5)
    tree, queries = drafting(shape, query=0.15)
    assert tree.steps == tuple(queries) == (1, 2, 1, 1)
    assert drafting(shape)[1] == [1, 5, 5, 5]
    flat, queries = drafting(shape, step=0.95)
    assert flat.steps == tuple(queries) == (1,) and flat.depth == 1


def test_nodes_below_their_price_are_not_sent_but_one_always_is(drafting: Drafting) -> None:
    shape = Budget.tree(nodes=60, levels=3, width=5)
    (whole, _), (worth, _) = drafting(shape), drafting(shape, node=0.05)
    assert len(whole.tokens) == 60 > len(worth.tokens) > 3 and np.exp(whole.scores).min() < 0.05
    assert sorted(worth.scores) == sorted(score for score in whole.scores if score >= math.log(0.05))
    for levels in (1, 3):
        one, _ = drafting(replace(shape, levels=levels), node=0.7)
        assert len(one.tokens) == 1 and np.exp(one.scores) == pytest.approx([0.6])


def test_copies_take_no_step_and_end_where_they_do_not_pay(drafting: Drafting) -> None:
    lengths = []
    for node in (0.0, 0.3, 0.6, 0.95):
        chain, queries = drafting(Budget.chain(0), REPEATED, mixed=True, node=node)
        assert queries == [] and chain.steps == ()
        assert list(chain.tokens) == [40 + (18 + at) % 40 for at in range(len(chain.tokens))]  # from 79 back to 40
        assert all(np.exp(chain.scores) >= max(node, 0.1))
        lengths.append(len(chain.tokens))
    assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == 0
    for shape in (Budget.tree(levels=0), Budget.chain(0)):
        copied, queries = drafting(shape, REPEATED, mixed=True)
        assert queries == [] and copied.steps == () and copied.parents == tuple(range(len(copied.tokens)))
        assert len(copied.tokens) > 5
        assert drafting(shape, REPEATED) == drafting(shape, mixed=True) == (DraftTree(), [])
