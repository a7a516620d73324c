"""The target's choice: the right distribution, and nothing but logits, sampling and position in it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moa_runtime.drafters.gumbel import gumbel
from moa_runtime.session.events import AnswerSampling, Sampling
from moa_server.engine.sampling import Chooser, choose, largest, logprobs_of, nucleus

P = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = np.log(P.astype(np.float32))


def test_logprobs_are_those_of_the_logits_whatever_changes_the_choice():
    sampling = Sampling(0.5, 0.5, 3, top_k=2, presence_penalty=2.0, logit_bias=((0, 99.0),), logprobs=2)
    chooser = Chooser(sampling, [1, 3], [4])
    assert chooser.choose(LOGITS) == 0
    chooser.choose(LOGITS, (3,))
    for each in chooser.logprobs:
        assert each.top_tokens == (1, 3) and np.allclose((each.logprob, *each.top_logprobs), np.log(P[[0, 1, 3]]))
    assert len(chooser.logprobs) == 2


@pytest.mark.parametrize(
    ("logits", "top", "values"),
    [
        ([1, 1, 1, 1], (0, 1), [-np.log(4)] * 3),  # of equal ones the lower ids
        ([np.nan, 0, -np.inf, 0], (1, 3), [-np.log(2)] * 3),
        ([np.inf, 0, 0, np.inf], (0, 3), [-np.inf, *[-np.log(2)] * 2]),
        ([1e9, 0, 0, 0], (0, 1), [-1e9, 0, -1e9]),
    ],
)
def test_logprobs_of_any_logits_are_logarithms_of_probabilities(logits, top, values):
    found = logprobs_of(np.array(logits, np.float32), 1, 2)
    assert found.top_tokens == top
    assert np.allclose((found.logprob, *found.top_logprobs), values)
    assert logprobs_of(np.array(logits, np.float32), 1, 9).top_tokens[:2] == top


SQUARED = P**2 / (P**2).sum()


def drawn(shares, seed: int, position: int) -> int:
    """The token that the noise of a position draws from a distribution."""
    with np.errstate(divide="ignore"):
        return int((np.log(shares) + gumbel(seed, position, np.arange(len(shares)))).argmax())


@pytest.mark.parametrize(
    ("sampling", "exact"),
    [
        (Sampling(1.0, 1.0, 3), P),
        (Sampling(0.5, 1.0, 3), SQUARED),
        (Sampling(1.0, 0.65, 3), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(0.5, 0.85, 3), [0, 0.64, 0, 0.36, 0]),  # the temperature comes before the nucleus: 0.58 + 0.33 are
        (Sampling(1.0, 1.0, 3, top_k=3), [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (Sampling(1.0, 0.8, 3, top_k=3), [0, 4 / 7, 0, 3 / 7, 0]),  # of what top-k leaves: 0.47 + 0.35 of 1
        (Sampling(1.0, 1.0, 3, min_p=0.3), [0, 8 / 17, 0, 6 / 17, 3 / 17]),
        (Sampling(0.5, 1.0, 3, min_p=0.3), [0, 0.64, 0, 0.36, 0]),  # the temperature comes before min-p
        (Sampling(1.0, 0.55, 3, min_p=0.3), [0, 8 / 14, 0, 6 / 14, 0]),  # before top-p: of 0.85, not of 1
        (Sampling(1.0, 0.45, 3, min_p=0.5), [0, 1, 0, 0, 0]),
    ],
)
def test_the_noise_draws_from_the_exact_distribution(sampling, exact):
    """Over positions, and over seeds at one position."""
    for n in range(100):
        assert choose(LOGITS, sampling, n) == drawn(exact, sampling.seed, n)
        assert choose(LOGITS, replace(sampling, seed=n), 77) == drawn(exact, n, 77)


def test_shares_are_the_exact_distribution():
    counts = np.bincount([choose(LOGITS, Sampling(0.5, 1.0, 3), position) for position in range(1000)], minlength=5)
    expected = 1000 * SQUARED
    assert ((counts - expected) ** 2 / expected).sum() < 16.7  # chi-square with 4 degrees of freedom: 99.8 %


PREFIX, ANSWER_FROM, STOPS = [0, 4, 4, 1, 3, 1], 3, (3,)  # the answer so far is 1, 3, 1


def exact_shares(sampling, path):
    """vLLM's order, by the definitions."""
    answer, every = [*PREFIX[ANSWER_FROM:], *path], [*PREFIX, *path]
    logits = LOGITS.astype(float) + 1.5  # of both signs, as the repetition penalty needs
    for token in range(5):
        if token in STOPS and len(answer) < sampling.min_tokens:
            logits[token] = -np.inf
        logits[token] += dict(sampling.logit_bias).get(token, 0)
        if token in every:
            logits[token] *= 1 / sampling.repetition_penalty if logits[token] > 0 else sampling.repetition_penalty
        logits[token] -= sampling.frequency_penalty * answer.count(token)
        logits[token] -= sampling.presence_penalty * (token in answer)
    weights = np.exp(logits / (sampling.temperature or 1e-3))
    weights[weights < sampling.min_p * weights.max()] = 0
    if sampling.top_k:
        weights[np.argsort(-weights)[sampling.top_k :]] = 0
    order = np.argsort(-weights)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p * weights.sum()]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("path", [(), (2,), (1, 2, 2)])
@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.75},
        {"presence_penalty": -0.5, "frequency_penalty": 0.5},
        {"frequency_penalty": 1.5, "temperature": 0.5},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5, "top_k": 3},
        {"logit_bias": ((0, 2.0), (1, -100.0), (4, 0.5))},
        {"min_tokens": 5},  # the answer has three and the path: the stop token is possible after two more
        {"min_tokens": 4, "logit_bias": ((3, 5.0),), "repetition_penalty": 2.0},
        {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.25},
        {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": ((2, 1.0),)}
        | {"temperature": 1.5, "min_p": 0.125, "top_k": 4, "top_p": 0.875},
    ],
    ids=lambda asked: "-".join(asked),
)
def test_shares_with_penalties_and_biases_are_the_exact_ones(asked, path):
    sampling = AnswerSampling(**{"temperature": 1.0, "answer_from": ANSWER_FROM} | asked)
    shares = exact_shares(sampling, path)
    for seed in range(100):
        chooser = Chooser(replace(sampling, seed=seed), PREFIX, STOPS)
        assert chooser.choose(LOGITS + np.float32(1.5), path) == drawn(shares, seed, len(PREFIX) + len(path))


@pytest.mark.parametrize(("path", "able"), [((), (0, 2, 4)), ((2,), (1, 3))])
@pytest.mark.parametrize("asked", [{}, {"top_k": 2}, {"temperature": 0.5, "min_p": 0.25}, {"repetition_penalty": 1.5}])
def test_shares_under_a_grammar_are_those_of_the_tokens_that_it_allows(asked, path, able):
    masks = {(1, 3, 1, *path): np.isin(np.arange(5), able)}
    state = SimpleNamespace(mask=lambda answer: masks[tuple(answer)])
    sampling = AnswerSampling(**{"temperature": 1.0, "answer_from": ANSWER_FROM} | asked)
    forbidden = tuple((token, -np.inf) for token in range(5) if token not in able)
    shares = exact_shares(replace(sampling, logit_bias=forbidden), path)
    for seed in range(100):
        chooser = Chooser(replace(sampling, seed=seed, state=state), PREFIX, STOPS)
        assert chooser.choose(LOGITS + np.float32(1.5), path) == drawn(shares, seed, len(PREFIX) + len(path))


def test_a_choice_after_a_drafted_path_is_that_after_the_same_tokens_in_the_prefix():
    """A chooser is asked along several paths of a tree, and nothing of one is left for the next."""
    rng = np.random.default_rng(4)
    heat = {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    for seed in range(100):
        sampling = AnswerSampling(**heat, seed=seed, min_tokens=9, answer_from=4)
        text = rng.integers(0, 50, 10).tolist()
        chooser = Chooser(sampling, text, (7,))
        for length in (3, 0, 2, 5):
            logits, path = rng.standard_normal(50).astype(np.float32) * 3, rng.integers(0, 50, length).tolist()
            expected = Chooser(sampling, [*text, *path], (7,)).choose(logits)
            assert chooser.choose(logits, path) == expected and (len(text) + length >= 13 or expected != 7)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0, 4.0, 50.0])
def test_the_choice_is_the_largest_of_logit_by_temperature_and_noise(temperature):
    """What is left out for speed could not have won."""
    rng = np.random.default_rng(2)
    for position in range(60):
        logits = (rng.standard_normal(5000) * rng.uniform(0.1, 6)).astype(np.float32)
        scores = logits / float(np.float32(temperature)) + gumbel(9, position, np.arange(5000))
        assert choose(logits, Sampling(temperature, 1.0, 9), position) == int(scores.argmax())


def test_of_equal_scores_the_lowest_id_wins(monkeypatch):
    monkeypatch.setattr("moa_server.engine.sampling.gumbel", lambda seed, position, tokens: np.zeros(len(tokens)))
    logits = np.array([1, 7, 3, 7, 7], np.float32)
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 0.5, top_k=3)):
        assert choose(logits, sampling, 5) == 1
    assert np.flatnonzero(largest(np.array([2.0, 1.0, 3.0, 2.0, 2.0]), 3)).tolist() == [0, 2, 3]
    assert largest(np.array([2.0, 1.0]), 2).all()
    for top_p, kept in ((0.5, [0, 1]), (0.999999, [0, 1, 2, 3])):
        assert np.flatnonzero(nucleus(np.array([2.0, 2, 2, 2]), top_p)).tolist() == kept


def test_a_temperature_and_a_nucleus_are_float32_as_on_the_wire():
    for position in range(300):
        wide, narrow = Sampling(0.7, 0.9, 1), Sampling(float(np.float32(0.7)), float(np.float32(0.9)), 1)
        assert choose(LOGITS, wide, position) == choose(LOGITS, narrow, position)


@pytest.mark.parametrize(
    ("sampling", "chosen"),
    [
        (Sampling(1e-40), {1}),
        (Sampling(-1.0), {1}),
        (Sampling(float("nan")), {1}),
        (Sampling(1e-30, 0.9, 1), {1}),
        (Sampling(1.0, 1e-30, (1 << 64) - 1), {1}),
        (Sampling(float("inf"), 1.0, -1), set(range(5))),
        (Sampling(1e30, float("nan"), 2**64), set(range(5))),
        (Sampling(1, 5), set(range(5))),
        (Sampling(1, 1, 1, -3, float("nan")), set(range(5))),
        (Sampling(1, 1, 1, 99, 9.0), set(range(5))),
    ],
)
def test_extreme_values_choose_the_most_probable_or_some_token(sampling, chosen):
    assert choose(LOGITS, sampling, 1 << 40) in chosen


def test_infinite_and_broken_logits():
    assert choose(np.array([-np.inf, np.nan, 1, -np.inf], np.float32), Sampling(1.0), 3) == 2
    assert choose(np.array([0, np.inf, 1], np.float32), Sampling(1.0), 3) == 1
    assert choose(np.full(3, np.nan, np.float32), Sampling(1.0), 3) == 0
    assert choose(np.array([-np.inf, 1, -np.inf], np.float32), Sampling(float("inf")), 3) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 8.0])  # 8: the nucleus has more than the first thousands
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_the_smallest_share(temperature, top_p):
    logits = np.random.default_rng(5).standard_normal(6000) * 3
    weights = np.exp((logits - logits.max()) / temperature)
    chosen = np.flatnonzero(nucleus(weights, top_p))
    assert weights[chosen].sum() >= top_p * weights.sum() * (1 - 1e-12)
    assert weights[chosen].sum() - weights[chosen].min() < top_p * weights.sum()
    assert weights[chosen].min() >= np.delete(weights, chosen).max(initial=0.0)
