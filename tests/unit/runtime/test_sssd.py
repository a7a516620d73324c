"""Drafting without a model: scores, merging, and how large the trees are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_runtime.datastore import Datastore, write_datastore
from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafters.gumbel import gumbel_of
from moa_runtime.drafters.sssd import SssdDrafter
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, depths

STOP = 0


def datastore_of(folder: Path, documents: list[list[int]]) -> Datastore:
    write_datastore(folder / "texts", documents, "t")
    return Datastore.open(folder / "texts", "t")


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The probability of each path."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return {path: math.exp(score) for path, score in zip(paths[1:], tree.scores, strict=True)}


def test_the_conversation_has_the_scores_of_the_paper() -> None:
    """Followers of a longer suffix are discounted less: 0.8 after two tokens, 0.7 after one."""
    drafted = paths_of(SssdDrafter().propose([1, 2, 3, 7, 8, 2, 4, 9, 1, 2], Budget.tree(nodes=4)))
    assert drafted == pytest.approx({(3,): 0.6, (3, 7): 0.6 * 0.8, (3, 7, 8): 0.6 * 0.8**2, (3, 7, 8, 2): 0.6 * 0.8**3})
    branches = paths_of(SssdDrafter().propose([2, 3, 7, 8, 2, 4, 9, 2], Budget.tree(nodes=4)))
    assert branches == pytest.approx({(3,): 0.3, (4,): 0.3, (3, 7): 0.3 * 0.7, (4, 9): 0.3 * 0.7})


def test_a_datastore_is_not_discounted(tmp_path: Path) -> None:
    drafter = SssdDrafter(datastore=datastore_of(tmp_path, [[1, 2, 5, 6], [1, 2, 5, 7], [3, 2, 8]]))
    drafted = paths_of(drafter.propose([1, 2], Budget.tree(nodes=5)))
    # Two continuations after (1, 2), and three after (2) alone; too few, so both count.
    expected = {(5,): 4 / 5, (5, 6): 2 / 5, (5, 7): 2 / 5, (8,): 1 / 5}
    assert drafted == pytest.approx(expected)


def test_a_node_of_both_sources_is_there_once_with_the_better_score(tmp_path: Path) -> None:
    drafter = SssdDrafter(datastore=datastore_of(tmp_path, [[1, 2, 3, 9]]))
    drafted = paths_of(drafter.propose([1, 2, 3, 4, 1, 2], Budget.tree(nodes=3)))
    assert drafted == pytest.approx({(3,): 1.0, (3, 9): 1.0, (3, 4): 0.6 * 0.8})


texts = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(texts, st.lists(texts, max_size=4), st.integers(0, 20), st.integers(0, 5), st.integers(0, 4), st.booleans())
def test_trees_keep_their_budget_and_copy_known_texts(
    tmp_path_factory, text, documents, nodes, depth, levels, branches
):
    drafter = SssdDrafter([STOP], datastore_of(tmp_path_factory.mktemp("store"), documents))
    tree = drafter.propose(text, Budget(nodes, levels, branches=branches, depth=depth))
    assert len(tree.tokens) <= nodes and tree.depth <= depth and STOP not in tree.tokens and not tree.steps
    assert branches or depths(tree.parents) == list(range(1, len(tree.tokens) + 1))
    assert list(tree.scores) == sorted(tree.scores, reverse=True)
    said = [text, *documents]
    paths = paths_of(tree)
    assert len(paths) == len(tree.tokens)
    for path in paths:
        run = [text[-1], *path]
        assert any(run == each[at : at + len(run)] for each in said for at in range(len(each)))


def test_only_confirmed_text_is_copied_within_the_reach() -> None:
    drafter = SssdDrafter()
    assert drafter.propose([7, 8, 7], Budget(1, 1, tentative=2)).tokens == ()
    assert drafter.propose([7, 8, 7], Budget(1, 1, tentative=1)).tokens == (8,)
    copied = [*range(20)] * 3
    assert drafter.propose(copied, Budget(1, 1, tentative=15)).tokens == (0,)
    assert drafter.propose(copied, Budget(1, 1, tentative=16)).tokens == ()


def test_a_chain_exceeds_its_levels_while_it_is_likely() -> None:
    text = [*range(10, 60), 10, 11, 12]
    tree = SssdDrafter().propose(text, Budget.chain(2))
    assert list(tree.tokens) == list(range(13, 13 + len(tree.tokens)))
    assert math.exp(tree.scores[-1]) >= 0.1 > math.exp(tree.scores[-1]) * 0.9
    assert len(SssdDrafter().propose(text, Budget.chain(30)).tokens) == 30


def test_tokens_that_do_not_pay_are_not_sent() -> None:
    text = [*range(10, 60), 10, 11, 12]
    dear = Budget(62, 0, branches=True, prices=Prices(node=0.5))
    assert [math.exp(score) >= 0.5 for score in SssdDrafter().propose(text, dear).scores] == [True, True]
    assert SssdDrafter().propose(text, Budget(62, 0, branches=True, prices=Prices(node=0.61))).tokens == ()
    assert len(SssdDrafter().propose(text, Budget(62, 1, branches=True, prices=Prices(node=0.61))).tokens) == 1


def test_trees_shrink_where_the_verifier_computes_tokens_less_cheaply() -> None:
    """The paper's section 4, with the loop's own controller."""
    text = [token for number in range(8) for token in (1, 2, 10 + number, 20 + number, 30 + number)] + [1, 2]

    def size(load: int) -> int:
        controller = CostModel()
        controller.observe(RoundEnded(40, 0, 0, 0, (), 0.0, 0.030, 0.020))
        for drafted in (4, 12, 24, 40) * 5:
            passed = 0.010 + load * 0.0003 * drafted
            controller.observe(RoundEnded(0, drafted, 4, 2, (), 0.0005, passed + 0.010, passed))
        return len(SssdDrafter().propose(text, controller.budget()).tokens)

    sizes = [size(load) for load in (1, 4, 16, 64)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 8 > sizes[-1] > 0, sizes


def test_the_noise_decides_between_equal_candidates() -> None:
    """A target that draws one of two tokens evenly, by the noise that the device knows too."""
    text = [1, 2, 1, 3, 7, 1]
    for seed in range(20):
        favoured = max((2, 3), key=lambda token: gumbel_of(seed, len(text), token))
        assert SssdDrafter().propose(text, Budget.chain(1, 1), Sampling(1.0, 1.0, seed)).tokens == (favoured,)
