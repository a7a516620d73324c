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
from support.grammars import STOP, VOCAB, saved_tokenizer

SIX = Grammar("regex", "(ab|cd){6}")
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


def test_a_compiler_that_is_loaded_builds_no_tokenizer_later(tmp_path, monkeypatch):
    saved_tokenizer(tmp_path / "tokenizer.json")
    made = GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, [STOP])
    made.load()
    monkeypatch.setattr("llguidance.LLTokenizer", None)
    assert made.compile(SIX).forced([]) == []
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
    assert tree.tokens[0] == compiler.ids("q")[0] and len(tree.tokens) == 7 and backend.steps == 1
    tree = drafter.propose(PROMPT, Budget.chain(3, 4), sampling)
    assert len(tree.tokens) == 4
    for other in (SssdDrafter([STOP]), NgramDrafter([STOP])):
        tree = other.propose([*PROMPT, *compiler.ids("qr")], Budget.chain(0, 16), sampling)
        assert list(tree.tokens) == [*compiler.ids("stxy"), STOP]


@pytest.mark.parametrize("mixture", [None, NgramMixture([STOP])])
def test_of_few_allowed_tokens_each_is_drafted_without_a_step(compiler, mixture):
    backend = Guessing([*compiler.ids("abcdz"), 9, 10])
    drafter = MoaDrafter(backend, max_context=100, stop_tokens=[STOP], mixture=mixture)
    sampling = replace(sampled(compiler, SIX), answer_from=3)
    tree = drafter.propose([5, *PROMPT], Budget.tree(nodes=20, levels=0), sampling)
    able = np.flatnonzero(compiler.compile(SIX).mask([])).tolist()
    first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
    assert sorted(first) == able and len(able) > 1 and len(tree.tokens) > len(able)
    assert backend.steps == 0 and tree.steps == () and set(tree.scores) == {-np.log(len(able))}
    dear = Budget(20, 0, branches=True, prices=Prices(node=0.6))
    assert not drafter.propose([5, *PROMPT], dear, sampling).tokens


def test_probabilities_are_those_among_what_is_allowed(compiler):
    mask = GrammarMask(sampled(compiler, SIX), PROMPT)
    a, c, z = compiler.ids("acz")
    left = mask.left(
        [DraftToken(z, np.log(0.5)), DraftToken(a, np.log(0.3)), DraftToken(c, np.log(0.1))], [], best=True
    )
    assert [(one.token, round(np.exp(one.logprob), 3)) for one in left] == [(a, 0.6), (c, 0.2)]
    few = mask.left([DraftToken(z, 0.0)], [], best=True)
    assert {one.token for one in few} >= {a, c} and sum(np.exp(one.logprob) for one in few) == pytest.approx(1)
    assert mask.left([DraftToken(z, 0.0)], []) == []
    assert GrammarMask(AnswerSampling(), PROMPT).left([DraftToken(z, 0.0)], []) == [DraftToken(z, 0.0)]
