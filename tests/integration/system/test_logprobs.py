"""Log probabilities of answers: the target's own, whoever drafted the tokens, as far as they are known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moa_drafter.target import Target
from moa_runtime.chat import Chat, ChatError
from moa_runtime.events import AnswerFinished, Origin, TokenLogprobs
from moa_runtime.session.events import Grammar, Policy, Sampling
from moa_server.engine.base import StepRequest, new_sequence
from moa_server.engine.load import load_local
from support.refusals import refused
from support.server.stepping import plain, random_tree, step
from support.system.asking import QUICK, ask, ask_and_leave, chatting, end_of, endpoint, ids

PROMPT = random.Random(5).sample(range(3, 512), 21)
#: Whatever changes a choice leaves the log probabilities as they are.
CHANGED = Sampling(
    0.9, 0.9, 7, top_k=40, min_p=0.01, presence_penalty=0.5, repetition_penalty=1.1, logit_bias=((9, 2.0),), logprobs=5
)


@pytest.fixture(scope="module", params=["transformers", "onnx"])
def engine(request: pytest.FixtureRequest, tiny_target: Path, tiny_drafter: Path) -> Iterator[Any]:
    if request.param == "transformers":
        yield request.getfixturevalue("transformers_engine")
        return
    engine = load_local(str(tiny_target), tiny_drafter, dtype="float32", threads=1)
    yield engine
    engine.close()


def assert_those_of(target: Target, before: Sequence[int], tokens: Sequence[int], found: Sequence[Any]) -> None:
    """The log probabilities of ``tokens`` are those of the target in torch, to 1e-4."""
    with torch.no_grad():
        logits = target.model(torch.tensor([[*before, *tokens]])).logits[0, len(before) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1).numpy()
    assert len(found) == len(tokens)
    for row, token, each in zip(expected, tokens, found, strict=True):
        assert each is not None
        np.testing.assert_allclose(each.logprob, row[token], atol=1e-4)
        np.testing.assert_allclose(each.top_logprobs, row[list(each.top_tokens)], atol=1e-4)
        np.testing.assert_allclose(each.top_logprobs, np.sort(row)[::-1][: len(each.top_tokens)], atol=1e-4)


def logprobs(answer: AnswerFinished) -> list[TokenLogprobs | None]:
    return [token.logprobs for token in answer.tokens]


def assert_answer(target: Target, chat: Chat, answer: AnswerFinished, count: int = 5) -> None:
    before = chat.tokens[: len(chat.tokens) - len(answer.tokens)]
    assert_those_of(target, before, ids(answer), logprobs(answer))
    assert {len(each.top_tokens) for each in logprobs(answer) if each is not None} == {count}


@pytest.mark.parametrize("sampling", [Sampling(logprobs=0), replace(CHANGED, logprobs=20)], ids=["greedy", "sampled"])
def test_steps_with_trees_have_those_of_the_target(engine: Any, target: Target, sampling: Sampling) -> None:
    """Of the accepted path and the choice after it, whatever was drafted beside it; none if none are asked for."""
    right, rng, most = plain(engine, PROMPT, replace(sampling, logprobs=None), 16), random.Random(3), sampling.logprobs
    accepted = 0
    for length in range(0, 12, 3):
        draft, parents = random_tree(rng, 8)
        node = 0
        for token, index in zip(right[length:], sorted(rng.sample(range(8), 3)), strict=False):
            draft[index], parents[index], node = token, node, index + 1
        asked = StepRequest(new_sequence(), [*PROMPT, *right[:length]], draft, parents, sampling)
        outcome = step(engine, asked)
        written = [*(draft[index] for index in outcome.path), outcome.token]
        accepted += len(outcome.path)
        assert_those_of(target, asked.prefix, written, outcome.logprobs)
        assert {len(each.top_tokens) for each in outcome.logprobs} == {most}
        assert step(engine, replace(asked, sampling=replace(sampling, logprobs=None))).logprobs == ()
        engine.release(asked.sequence)
    assert accepted >= 9


@pytest.mark.parametrize("drafting", ["device", "server", "auto"])
async def test_an_answer_has_those_of_the_target_whoever_drafts(bundle, verifier, target, drafting):
    async with chatting(bundle, endpoint(verifier), settings=replace(QUICK, drafting=drafting)) as chat:
        for sampling in (Sampling(logprobs=5), CHANGED):
            chat.restore([])
            answer = await ask(chat, count=40, sampling=sampling)
            assert_answer(target, chat, answer)
            chat.restore([])
            assert ids(await ask(chat, count=40, sampling=replace(sampling, logprobs=None))) == ids(answer)
        assert logprobs(await ask(chat, count=3)) == [None] * 3


async def test_tokens_that_a_grammar_forces_have_them_too(chat: Chat, target: Target) -> None:
    pytest.importorskip("llguidance")
    async with chat:
        answer = await ask(chat, count=40, sampling=replace(CHANGED, grammar=Grammar("regex", "abc (yes|no), because")))
        assert answer.text.startswith("abc ")
        assert_answer(target, chat, answer)


async def test_they_are_known_after_an_outage_and_for_a_continued_answer(bundle, verifier, target, tmp_path):
    """What the verifier wrote meanwhile has them; what the device kept, and an earlier program had, has none."""
    long = replace(CHANGED, min_tokens=60)
    options = {"settings": replace(QUICK, drafting="server"), "store": tmp_path / "chat"}
    async with chatting(bundle, endpoint(verifier), **options) as chat:
        fetched, _ = await ask_and_leave(chat, count=40, after=4, sampling=long)
        assert_answer(target, chat, fetched)
        whole = await end_of(chat.continue_answer(max_new_tokens=8))
        assert ids(whole)[:40] == ids(fetched) and logprobs(whole)[:40] == logprobs(fetched)
        assert_answer(target, chat, whole)
    async with chatting(bundle, endpoint(verifier), **options) as chat:
        whole = await end_of(chat.continue_answer(max_new_tokens=4))
        assert [each is None for each in logprobs(whole)] == [True] * 48 + [False] * 4
    async with chatting(bundle, endpoint(verifier), policy=Policy.KEEP) as chat:
        kept, _ = await ask_and_leave(chat, count=60, after=4, sampling=long)
        assert {token.origin is Origin.KEPT for token in kept.tokens if token.logprobs is None} == {True}
        assert all(token.logprobs is None for token in kept.tokens if token.origin is Origin.KEPT)


async def test_a_verifier_without_them_is_not_asked(chat: Chat) -> None:
    async with chat:
        await asyncio.sleep(0)
        chat._session.capabilities = frozenset()
        with refused("unsupported_logprobs", ChatError):
            await ask(chat, sampling=Sampling(logprobs=0))
        chat._session.capabilities = None
        with refused("out_of_range", ChatError):
            await ask(chat, sampling=Sampling(logprobs=21))
