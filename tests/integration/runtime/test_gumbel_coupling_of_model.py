"""Gumbel coupling in drafts of the tiny drafter."""

from __future__ import annotations

import numpy as np
import pytest

from moa_runtime.backends.base import Backend
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import depths
from unit.runtime.test_gumbel import WARM

PREFIX = list(range(40, 52))


def drafted(backend: Backend, budget: Budget, sampling: Sampling, prefix: list[int], mixture: bool = False):
    drafter = MoaDrafter(backend, max_context=512, mixture=NgramMixture() if mixture else None)
    rows = np.random.default_rng(3).standard_normal((2, len(PREFIX) - 1, *backend.kv_shape)).astype(np.float32)
    drafter.add_rows(0, *rows)
    return drafter.propose(prefix, budget, sampling)


@pytest.mark.parametrize("mixture", [False, True], ids=["alone", "mixed"])
def test_a_tree_s_chances_are_those_of_its_nodes_drafted_alone(reference, mixture):
    """Each node at its own position, by the noise of that: as the only level of a tree behind its path."""
    tree = drafted(reference, Budget.tree(nodes=20, levels=4, width=3), WARM, PREFIX, mixture)
    assert len(tree.tokens) == 20 and max(depths(tree.parents)) >= 2
    for index in range(20):
        path, node = list[int](), tree.parents[index]
        before = tree.scores[node - 1] if node else 0.0
        while node:
            path.insert(0, tree.tokens[node - 1])
            node = tree.parents[node - 1]
        wide = Budget(99, 1, 99, branches=True, tentative=len(path))
        alone = drafted(reference, wide, WARM, [*PREFIX, *path], mixture)
        chances = {
            token: score for token, score, p in zip(alone.tokens, alone.scores, alone.parents, strict=True) if not p
        }
        assert tree.scores[index] - before == pytest.approx(chances[tree.tokens[index]], abs=1e-3)


def test_drafts_follow_the_seed(reference):
    drafts = [drafted(reference, Budget.chain(6), Sampling(1.0, 1.0, seed), PREFIX).tokens for seed in (*range(8), 0)]
    assert drafts[0] == drafts[-1] and len(set(drafts)) > 4
