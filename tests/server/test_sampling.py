"""The target's choice: the right distribution, and nothing but logits, sampling and position in it."""

from __future__ import annotations

import numpy as np
import pytest

from moa_runtime.session.server import Sampling
from moa_server.sampling import choose, nucleus, uniform

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))


def shares(sampling: Sampling, draws: int = 20_000) -> np.ndarray:
    chosen = [choose(LOGITS, sampling, position) for position in range(draws)]
    return np.bincount(chosen, minlength=len(LOGITS)) / draws


def test_greedy_takes_the_lowest_of_equal_ids():
    assert choose(np.array([1, 7, 3, 7], np.float32), Sampling(), 5) == 1


def test_sampled_shares_are_the_probabilities():
    assert shares(Sampling(1.0, 1.0, 3)) == pytest.approx([0.05, 0.4, 0.1, 0.3, 0.15], abs=0.012)


def test_temperature_sharpens():
    squared = np.array([0.05, 0.4, 0.1, 0.3, 0.15]) ** 2
    assert shares(Sampling(0.5, 1.0, 3)) == pytest.approx(squared / squared.sum(), abs=0.012)


def test_top_p_leaves_the_nucleus_only():
    assert shares(Sampling(1.0, 0.65, 3)) == pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=0.012)


@pytest.mark.parametrize(
    ("weights", "top_p", "kept"),
    [
        ([1, 5, 3, 1], 0.85, [1, 5, 3, 0]),
        ([1, 5, 3, 1], 0.5, [0, 5, 0, 0]),
        ([1, 5, 3, 1], 1e-9, [0, 5, 0, 0]),
        ([2, 2, 2, 2], 0.5, [2, 2, 0, 0]),
        ([2, 2, 2, 2], 0.999999, [2, 2, 2, 2]),
    ],
)
def test_nucleus(weights, top_p, kept):
    assert nucleus(np.array(weights, float), top_p).tolist() == kept


def test_the_choice_is_a_function_of_seed_and_position():
    first = [choose(LOGITS, Sampling(1.0, 1.0, 7), position) for position in range(200)]
    again = [choose(LOGITS, Sampling(1.0, 1.0, 7), position) for position in reversed(range(200))]
    other = [choose(LOGITS, Sampling(1.0, 1.0, 8), position) for position in range(200)]
    assert first == again[::-1]
    assert first != other


def test_neighbouring_positions_and_seeds_are_uncorrelated():
    draws = np.array([[uniform(seed, position) for position in range(400)] for seed in range(2)])
    assert draws.mean() == pytest.approx(0.5, abs=0.05)
    assert abs(np.corrcoef(draws[0, :-1], draws[0, 1:])[0, 1]) < 0.15
    assert abs(np.corrcoef(draws)[0, 1]) < 0.15


def test_a_temperature_means_what_it_means_on_the_wire():
    for position in range(300):
        wide, narrow = Sampling(0.7, 0.9, 1), Sampling(float(np.float32(0.7)), float(np.float32(0.9)), 1)
        assert choose(LOGITS, wide, position) == choose(LOGITS, narrow, position)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1e-40),
        Sampling(-1.0),
        Sampling(float("nan")),
        Sampling(1e-30, 0.9, 1),
        Sampling(1.0, 1e-30, (1 << 64) - 1),
    ],
)
def test_extreme_values_choose_the_most_probable(sampling):
    assert choose(LOGITS, sampling, 1 << 40) == 1


@pytest.mark.parametrize(
    "sampling", [Sampling(float("inf"), 1.0, -1), Sampling(1e30, float("nan"), 2**64), Sampling(1, 5)]
)
def test_extreme_values_choose_some_token(sampling):
    assert 0 <= choose(LOGITS, sampling, 0) < len(LOGITS)


def test_infinite_and_broken_logits():
    assert choose(np.array([-np.inf, np.nan, 1, -np.inf], np.float32), Sampling(1.0), 3) == 2
    assert choose(np.array([0, np.inf, 1], np.float32), Sampling(1.0), 3) == 1
    assert choose(np.full(3, np.nan, np.float32), Sampling(1.0), 3) == 0


@pytest.mark.parametrize("temperature", [0.3, 1.0, 8.0])  # 8: the nucleus has more than the first thousands
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_the_smallest_share(temperature, top_p):
    logits = np.random.default_rng(5).standard_normal(6000) * 3
    weights = np.exp((logits - logits.max()) / temperature)
    kept = nucleus(weights, top_p)
    chosen = np.flatnonzero(kept)
    assert weights[chosen].sum() >= top_p * weights.sum() * (1 - 1e-12)
    assert weights[chosen].sum() - weights[chosen].min() < top_p * weights.sum()
    assert weights[chosen].min() >= np.delete(weights, chosen).max(initial=0.0)
