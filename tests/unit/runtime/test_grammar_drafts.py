"""Drafts obey the grammar of the answer, and begin with what it forces."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("llguidance")

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.base import Budget, DraftToken, Prices
from moa_runtime.drafters.grammar_mask import GrammarMask
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramDrafter, NgramMixture
from moa_runtime.drafters.sssd import SssdDrafter
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.session.events import AnswerSampling, Grammar
from moa_runtime.session.tree import path_to
from support.grammars import STOP, VOCAB, saved_tokenizer

SIX = Grammar("regex", "(ab|cd){6}")
FORKS = Grammar("regex", "(axyz|bxy|c)(a|b)(xyz|xz)[a-d]{4}")
WORD = Grammar("regex", "q(rst|uvw)xy")
PROMPT = [3, 4]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "tokenizer.json"
    text = saved_tokenizer(path)
    made = GrammarCompiler(path, VOCAB, [STOP])
    made.ids = lambda word: [text.token_to_id(letter) for letter in word]
    yield made
    made.close()


class Guessing(Backend):
    """Its candidates are letters of the grammars and others, by the query's token and position."""

    top_k, kv_shape, max_positions = 6, (1, 2), None

    def __init__(self, letters) -> None:
        self._letters, self.steps = letters, 0

    def step(self, inputs: StepInputs) -> StepResult:
        self.steps += 1
        tokens = []
        for query in inputs.queries:
            rng = random.Random(int(1000 * inputs.tokens[query] + inputs.positions[query]))
            tokens.append(rng.sample(self._letters, self.top_k))
        logprobs = np.log([[0.3, 0.2, 0.15, 0.1, 0.1, 0.05]] * len(tokens)).astype(np.float32)
        kept = np.zeros((len(inputs.tokens), *self.kv_shape), np.float32)
        return StepResult(np.array(tokens), logprobs, kept, kept)


def sampled(compiler, grammar: Grammar, temperature: float = 0.0) -> AnswerSampling:
    return AnswerSampling(temperature, seed=7, grammar=grammar, answer_from=2, state=compiler.compile(grammar))


def drafters(compiler):
    letters = [*compiler.ids("abcdz"), 9, 10, 11, STOP]
    yield MoaDrafter(Guessing(letters), max_context=100, stop_tokens=[STOP])
    yield MoaDrafter(Guessing(letters), max_context=100, stop_tokens=[STOP], mixture=NgramMixture([STOP]))
    yield SssdDrafter([STOP])
    yield NgramDrafter([STOP])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "budget", [Budget.chain(6, 12), Budget.tree(nodes=20, levels=4, width=3)], ids=["chain", "tree"]
)
def test_no_forbidden_token_is_drafted(compiler, temperature, budget):
    sampling, reference, drafted = sampled(compiler, SIX, temperature), compiler.compile(SIX), 0
    copied = compiler.ids("ababcdz") * 3  # of which some is forbidden
    for drafter in drafters(compiler):
        for written in ("", "ab", "abc", "cdabcdab", "abcdabcdab", "abcdabcdabc"):
            prefix = [*copied[:-2], *PROMPT, *compiler.ids(written)]
            own = AnswerSampling(**{**vars(sampling), "answer_from": len(prefix) - len(written)})
            tree = drafter.propose(prefix, budget, own)
            assert all(reference.allowed(compiler.ids(written), tree.tokens, tree.parents)), written
            drafted += len(tree.tokens)
    assert drafted > 60


def test_forced_tokens_come_first_and_take_no_step(compiler):
    letters = [*compiler.ids("ruxaz"), 9, 10]
    backend, sampling = Guessing(letters), sampled(compiler, WORD)
    drafter = MoaDrafter(backend, max_context=100, stop_tokens=[STOP])
    tree = drafter.propose([*PROMPT, *compiler.ids("qr")], Budget.chain(3, 16), sampling)
    assert list(tree.tokens) == [*compiler.ids("stxy"), STOP] and set(tree.scores) == {0.0} and backend.steps == 0
    tree = drafter.propose(PROMPT, Budget.chain(3, 16), sampling)
    assert tree.tokens[0] == compiler.ids("q")[0] and len(tree.tokens) == 2 and backend.steps == 1
    tree = drafter.propose(PROMPT, Budget.chain(3, 1), sampling)
    assert list(tree.tokens) == compiler.ids("q")
    for other in (SssdDrafter([STOP]), NgramDrafter([STOP])):
        tree = other.propose([*PROMPT, *compiler.ids("qr")], Budget.chain(0, 16), sampling)
        assert list(tree.tokens) == [*compiler.ids("stxy"), STOP]


def nodes_of(tree) -> set[tuple[int, ...]]:
    """The paths to its nodes."""
    return {tuple(path_to(node, tree.tokens, tree.parents)) for node in range(1, 1 + len(tree.tokens))}


@pytest.mark.parametrize(
    "budget", [Budget.tree(nodes=40, levels=2, width=3), Budget.chain(2, 40)], ids=["tree", "chain"]
)
def test_forced_tokens_take_no_level_and_end_a_path_if_the_next_choice_pays_for_them(compiler, budget):
    """The verifier commits them itself; those between two others are read in one step."""
    backend = Guessing([*compiler.ids("abcd"), 9, 10])
    drafter, sampling = MoaDrafter(backend, max_context=100, stop_tokens=[STOP]), sampled(compiler, FORKS)
    for written, price in (("", 0.0), ("bxy", 0.0), ("", 0.2), ("bxy", 0.2)):
        before, priced = backend.steps, replace(budget, prices=Prices(node=price))
        tree = drafter.propose([*PROMPT, *compiler.ids(written)], priced, sampling)
        scores = dict(zip(range(1, 99), tree.scores, strict=False))
        ends = set(scores).difference(tree.parents)
        assert ends and backend.steps == before + 2
        for end in ends:
            path = path_to(end, tree.tokens, tree.parents)
            forced = [at for at in range(len(path)) if sampling.state.forced([*compiler.ids(written), *path[:at]])]
            run = next(n for n in range(len(path) + 1) if len(path) - 1 - n not in forced)
            after = sampling.state.forced([*compiler.ids(written), *path])
            assert run * price <= np.exp(scores[end]) + 1e-9, "an end that does not pay"
            assert (
                not after or STOP in after or len(after) * price > np.exp(scores[end]) or len(scores) + len(after) > 40
            )


class Remembering(Guessing):
    """Its candidates are by all tokens that the query attends to."""

    def step(self, inputs: StepInputs) -> StepResult:
        own = np.zeros((len(inputs.tokens), *self.kv_shape), np.float32)
        own[:, 0, 0] = inputs.tokens + 1000 * inputs.positions
        known = np.concatenate((inputs.self_keys[:, 0, 0], own[:, 0, 0]))
        queries = [int(known[inputs.self_mask[query]].sum()) for query in inputs.queries]
        tokens = [random.Random(query).sample(self._letters, self.top_k) for query in queries]
        logprobs = np.log([[0.3, 0.2, 0.15, 0.1, 0.1, 0.05]] * len(tokens)).astype(np.float32)
        return StepResult(np.array(tokens), logprobs, own, own)


def test_a_tree_with_forced_tokens_is_that_of_its_paths_one_by_one(compiler):
    letters, sampling, compared = [*compiler.ids("abcdxyz"), 9, 10], sampled(compiler, FORKS), 0
    tree = MoaDrafter(Remembering(letters), max_context=100).propose(PROMPT, Budget.tree(60, 3, 4), sampling)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents, 1):
        children.setdefault(parent, []).append(node)
    for node, after in children.items():
        path = path_to(node, tree.tokens, tree.parents)
        alone = MoaDrafter(Remembering(letters), max_context=100).propose(
            [*PROMPT, *path], Budget.tree(999, 1), sampling
        )
        if len(after) > 1:  # no guess
            drafted = {tree.tokens[index - 1] for index in after}
            assert drafted <= {token for token, parent in zip(alone.tokens, alone.parents, strict=True) if not parent}
            best = max(after, key=lambda index: tree.scores[index - 1])
            assert tree.tokens[best - 1] == alone.tokens[0]
            compared += any(sampling.state.forced(path[:at]) for at in range(1, len(path)))
    assert compared >= 3


def test_a_tree_that_reads_forced_tokens_keeps_to_the_room_of_the_answer(compiler):
    drafter = MoaDrafter(Guessing([*compiler.ids("abcd"), 9, 10]), max_context=100, stop_tokens=[STOP])
    sampling = sampled(compiler, FORKS)
    for depth in range(1, 8):
        budget = replace(Budget.tree(nodes=40, levels=4, width=3), depth=depth)
        assert max(map(len, nodes_of(drafter.propose(PROMPT, budget, sampling)))) <= depth


def test_a_target_that_samples_may_choose_each_of_some_tokens(compiler):
    """The noise tells which is likely."""
    digits = Grammar("regex", "[0-9a-h]{9}")
    for temperature, several in ((0.0, False), (1.0, True)):
        sampling = sampled(compiler, digits, temperature)
        able = np.flatnonzero(sampling.state.mask([])).tolist()
        assert 8 < len(able) <= 64
        mask = GrammarMask(sampling, PROMPT)
        none = mask.left([DraftToken(9, 0.0)], [], best=True)
        some = mask.left([DraftToken(9, np.log(0.4)), DraftToken(able[3], np.log(0.2))], [], best=True)
        assert [one.token for one in none] == (able if several else [])
        assert some[0].token == able[3] and (len(some) == len(able)) == several
        assert sum(np.exp(one.logprob) for one in some) <= 1 + 1e-9
        assert all(one.logprob <= some[0].logprob for one in some)


@pytest.mark.parametrize("mixture", [None, NgramMixture([STOP])])
def test_of_few_allowed_tokens_each_is_drafted_without_a_step(compiler, mixture):
    backend = Guessing([*compiler.ids("abcdz"), 9, 10])
    drafter = MoaDrafter(backend, max_context=100, stop_tokens=[STOP], mixture=mixture)
    sampling = replace(sampled(compiler, SIX), answer_from=3)
    tree = drafter.propose([5, *PROMPT], Budget.tree(nodes=20, levels=0), sampling)
    able = np.flatnonzero(compiler.compile(SIX).mask([])).tolist()
    first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
    assert sorted(first) == able and len(able) > 1 and len(tree.tokens) > len(able)
    assert backend.steps == 0 and tree.steps == () and max(tree.scores) == -np.log(len(able))
    dear = Budget(20, 0, branches=True, prices=Prices(node=0.6))
    assert not drafter.propose([5, *PROMPT], dear, sampling).tokens


def test_probabilities_are_those_among_what_is_allowed(compiler):
    mask = GrammarMask(sampled(compiler, SIX), PROMPT)
    a, c, z = compiler.ids("acz")
    left = mask.left(
        [DraftToken(z, np.log(0.5)), DraftToken(a, np.log(0.3)), DraftToken(c, np.log(0.1))], [], best=True
    )
    assert [(one.token, round(np.exp(one.logprob), 3)) for one in left] == [
        (a, 0.6),
        (c, 0.2),
        (*compiler.ids(["ab"]), 0.2),
    ]
    few = mask.left([DraftToken(z, 0.0)], [], best=True)
    assert {one.token for one in few} >= {a, c} and sum(np.exp(one.logprob) for one in few) == pytest.approx(1)
    assert mask.left([DraftToken(z, 0.0)], []) == []
    assert GrammarMask(AnswerSampling(), PROMPT).left([DraftToken(z, 0.0)], []) == [DraftToken(z, 0.0)]
