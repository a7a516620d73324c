"""The verifier's own drafts: steps that run as one, copies, and for whom the model drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from moa_runtime.backends.base import StepInputs, StepResult
from moa_runtime.drafters.moa import Steps
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_server.drafting.batched_backend import BatchedBackend, draft_together
from moa_server.drafting.drafting_cost import LEVELS, DraftingCost, drafts_that_pay
from moa_server.drafting.own_draft import NOTHING, OwnDraft, copied

GREEDY = Sampling()
BROKEN = 13


class Half(BatchedBackend):
    """Answers each step with its first token, and refuses one of them."""

    top_k, kv_shape = 1, (1, 2)

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        tokens = [int(each.tokens[0]) for each in inputs]
        self.batches.append(tokens)
        if BROKEN in tokens:
            raise RuntimeError("no step over thirteen")
        nothing = np.zeros((1, 1, 2), np.float32)
        return [StepResult(np.array([[token]]), np.zeros((1, 1), np.float32), nothing, nothing) for token in tokens]


def drafting(tokens: Sequence[int], error: Exception | None = None) -> Steps[DraftTree]:
    """A draft of what the steps answer."""
    nothing, heard = np.zeros((0, 1, 2), np.float32), []
    for token in tokens:
        result = yield StepInputs.chain([token], (nothing, nothing), (nothing, nothing))
        heard.append(int(result.top_tokens[0, 0]))
    if error is not None:
        raise error
    return DraftTree.chain(heard, [0.0] * len(heard))


def test_steps_of_all_drafts_are_one_and_those_that_end_or_fail_affect_no_other():
    half, mistake = Half(), ValueError("a drafter's mistake")
    works = [[1, 2, 3], [], [4], [5, BROKEN, 6], [7, 8]]
    *found, failed = draft_together(half, [*map(drafting, works), drafting([9], mistake)])
    assert failed is mistake and isinstance(found.pop(3), RuntimeError)
    assert [list(tree.tokens) for tree in found] == [works[0], works[1], works[2], works[4]]
    alone = [[2], [BROKEN], [8]]
    assert half.batches == [[1, 4, 5, 7, 9], [2, BROKEN, 8], *alone, [3]]


TREE = OwnDraft((5, 6, 7, 5, 9), (0, 1, 1, 0, 2), (0.5, 0.5, 0.25, 0.2, 0.8), True)


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        ((), TREE),
        ((5,), OwnDraft((6, 7, 9), (0, 0, 1), (0.5, 0.25, 0.8), True)),
        ((5, 6), OwnDraft((9,), (0,), (0.8,), True)),
        ((5, 6, 9), OwnDraft(modelled=True)),
        ((6,), NOTHING),
    ],
)
def test_what_is_left_of_a_draft_follows_the_committed_tokens(tokens, left):
    assert TREE.after(tokens) == left
    assert TREE.paths == pytest.approx([0.5, 0.25, 0.125, 0.2, 0.2])


def test_a_draft_is_cut_at_levels_and_made_of_a_drafters_tree():
    assert TREE.cut(1) == OwnDraft((5, 5), (0, 0), (0.5, 0.2), True) and TREE.cut(3) is TREE
    assert TREE.cut(2) == OwnDraft((5, 6, 7, 5), (0, 1, 1, 0), (0.5, 0.5, 0.25, 0.2), True)
    made = OwnDraft.of(DraftTree((5, 6), (0, 1), (-0.5, -2.0), (1,)))
    assert made.modelled and made.probabilities == pytest.approx(np.exp([-0.5, -1.5]))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 1.0, 5)])
def test_copies_are_the_likeliest_continuations(sampling):
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    mixture = NgramMixture()
    mixture.confirm(text)
    tree = copied(mixture, text, sampling, 4, branches=True)
    assert {token for token, parent in zip(tree.tokens, tree.parents, strict=True) if not parent} <= {4, 5}
    paths = tree.paths
    assert paths == sorted(paths, reverse=True) and min(paths) > 0.029  # the first ones are the best ones
    chain = copied(mixture, text, sampling, 2, branches=False)
    assert list(chain.parents) == list(range(len(chain.tokens))) and 1 <= len(chain.tokens) <= 2
    assert (
        copied(mixture, text, sampling, 0, branches=True)
        == copied(mixture, [7, 8], sampling, 3, branches=True)
        == NOTHING
    )


def cost_of(step_s: float, more_s: float) -> DraftingCost:
    cost = DraftingCost()
    for levels, count in itertools.product((1, 3), (1, 2, 8)):
        cost.observe(levels, count, levels * (step_s + more_s * count))
    return cost


def likely(rate: float, count: int) -> list[np.ndarray]:
    return [np.tile(rate ** np.arange(1.0, LEVELS + 1), (4, 1)) for _ in range(count)]


def line(first: float, row: float, count: int):
    return lambda rows: first + row * (count + rows)


def test_the_cost_of_a_draft_is_learnt():
    cost = cost_of(2e-3, 1e-3)
    assert cost.seconds(4, 6) == pytest.approx(4 * 8e-3, rel=0.1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("step", [(20e-3, 1e-3), (10e-3, 8e-3), (9e-3, 2e-3)])
@pytest.mark.parametrize("draft", [(1e-4, 1e-5), (3e-3, 1e-3), (2e-2, 0.0)])
@pytest.mark.parametrize("row_s", [0.0, 2e-3])
@pytest.mark.parametrize("least_gain", [1.0, 1.12])
def test_the_model_drafts_if_tokens_a_second_grow(count, step, draft, row_s, least_gain):
    """Against all choices by hand."""
    cost, seconds, paths = cost_of(*draft), line(*step, count), likely(0.6, count)
    found = drafts_that_pay(paths, [()] * count, cost, seconds, row_s, least_gain)
    now = count / seconds(np.zeros(1))[0]

    def rate(sessions: int, deep: int) -> float:
        price = now * step[1]
        right = [one for one in paths[0][0][:deep] if one >= price]
        rows_s = row_s * sessions * (1 + sum(right))
        return (count + sessions * sum(right)) / (
            seconds(sessions * len(right)) + cost.seconds(deep, sessions) + rows_s
        )

    rates = {each: rate(*each) for each in itertools.product(range(1, count + 1), range(1, LEVELS + 1))}
    best = max(rates, key=rates.__getitem__)
    assert (len(found.chosen), found.levels) == (best if rates[best] >= least_gain * now else (0, 0))


def test_a_better_draft_makes_the_model_superfluous_and_those_without_a_drafter_are_left_out():
    cost, seconds = cost_of(1e-4, 1e-4), line(20e-3, 1e-3, 3)
    paths = [likely(0.8, 1)[0], np.empty((0, LEVELS)), likely(0.8, 1)[0]]
    assert drafts_that_pay(paths, [()] * 3, cost, seconds).chosen == [0, 2]
    assert drafts_that_pay(paths, [[0.01] * 16] * 3, cost, seconds).chosen == [0, 2]  # none is worth its row
    assert drafts_that_pay(paths, [[0.95] * 4, (), ()], cost, seconds).chosen == [2]
    assert not drafts_that_pay([paths[1]], [()], cost, seconds).chosen
    lacking = [0, 0, 10_000]
    assert drafts_that_pay(paths, [()] * 3, cost, seconds, 2e-4, lacking=lacking).chosen == [0], "rows of a long prompt"
