"""Draft trees of the tiny drafter."""

from __future__ import annotations

import numpy as np
import pytest

from moa_runtime.backends.base import Backend, StepInputs
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import WEIGHTS, NgramMixture
from moa_runtime.session.tree import check_parents, depths
from support.drafted import draft_of, path_of

PREFIX = list(range(40, 52))


def drafter_on(backend: Backend, max_context: int = 512) -> MoaDrafter:
    rng = np.random.default_rng(3)
    drafter = MoaDrafter(backend, max_context=max_context)
    drafter.add_rows(0, *rng.standard_normal((2, len(PREFIX) - 1, *backend.kv_shape)).astype(np.float32))
    return drafter


def test_a_tree_s_scores_are_those_of_its_paths(reference: Backend) -> None:
    """Every node, scored along its path in one causal pass."""
    drafter = drafter_on(reference)
    tree = drafter.propose(PREFIX, Budget.tree(nodes=20, levels=4, width=3))
    assert len(tree.tokens) == 20 and check_parents(tree.parents, 20) == list(tree.parents)
    assert max(depths(tree.parents)) <= 4 and tree.depth >= 2
    memory = drafter._memory_of(len(PREFIX))
    nothing = np.zeros((0, *reference.kv_shape), np.float32)
    for index in range(20):
        path: list[int] = []
        node = index + 1
        while node:
            path.insert(0, tree.tokens[node - 1])
            node = tree.parents[node - 1]
        tokens = [*PREFIX, *path]
        result = reference.step(StepInputs.chain(tokens, (nothing, nothing), memory, asked=len(tokens)))
        score = 0.0
        for at, token in enumerate(path, len(PREFIX) - 1):
            score += dict(zip(result.top_tokens[at].tolist(), result.top_logprobs[at].tolist(), strict=True))[token]
        assert tree.scores[index] == pytest.approx(score, abs=1e-3)


def test_a_chain_after_a_tree_is_what_it_was_before(backend: Backend) -> None:
    drafter = drafter_on(backend)
    before = draft_of(drafter, PREFIX, 4)
    drafter.propose(PREFIX, Budget.tree(nodes=30, levels=3, width=4))
    assert [one.token for one in draft_of(drafter, PREFIX, 4)] == [one.token for one in before]


def test_a_tree_stays_within_the_context(reference: Backend) -> None:
    room = drafter_on(reference, len(PREFIX) + 2).propose(PREFIX, Budget.tree(nodes=30, levels=6, width=2))
    assert room.depth == 2
    assert drafter_on(reference, len(PREFIX)).propose(PREFIX, Budget.tree()).tokens == ()


def test_a_tree_grows_along_what_was_said_before(reference: Backend) -> None:
    """The last five tokens occurred before. What followed then is the likeliest path; the drafter's are beside it."""
    text = [*range(40, 52), *range(40, 48)]
    rng = np.random.default_rng(3)
    memory = rng.standard_normal((2, len(text) - 1, *reference.kv_shape)).astype(np.float32)
    trees = []
    for mixture in (None, NgramMixture()):
        drafter = MoaDrafter(reference, max_context=512, mixture=mixture)
        drafter.add_rows(0, *memory)
        trees.append(drafter.propose(text, Budget.tree(nodes=20, levels=4, width=3)))
    alone, mixed = trees
    assert path_of(mixed)[:3] == [48, 49, 50]
    first = [token for token, parent in zip(mixed.tokens, mixed.parents, strict=True) if parent == 0]
    assert set(first) - {48} <= set(alone.tokens)
    assert np.exp(mixed.scores[mixed.tokens.index(48)]) >= WEIGHTS[8]
    assert sum(np.exp(mixed.scores[at]) for at, parent in enumerate(mixed.parents) if parent == 0) <= 1 + 1e-5


def test_a_tree_goes_on_copying_below_its_last_level(reference: Backend) -> None:
    """Without a step for it, up to its nodes, and not beyond the context."""
    text = [*range(40, 80), *range(40, 58)]
    rng = np.random.default_rng(3)
    memory = rng.standard_normal((2, len(text) - 1, *reference.kv_shape)).astype(np.float32)

    def path(max_context: int) -> list[int]:
        drafter = MoaDrafter(reference, max_context=max_context, mixture=NgramMixture())
        drafter.add_rows(0, *memory)
        return path_of(drafter.propose(text, Budget.tree(nodes=20, levels=2, width=3)))

    copied = path(512)
    assert len(copied) > 8 and copied == list(range(58, 58 + len(copied)))
    assert len(path(len(text) + 4)) == 4
