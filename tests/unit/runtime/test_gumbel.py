"""The noise (published vectors, the page's numbers, statistics) and candidates ranked with it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from moa_runtime.drafters.base import DraftToken
from moa_runtime.drafters.gumbel import (
    LEAST,
    MOST,
    NO_COUPLING,
    OTHERS,
    TRUST,
    GumbelCoupling,
    gumbel,
    gumbel_of,
    threefry,
)
from moa_runtime.session.events import Sampling

ALL = 0xFFFFFFFF
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), (0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8)),
        ((ALL,) * 4, (ALL,) * 4, (0x2A881696, 0x57012287, 0xF6C7446E, 0xA16A6732)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89),
            (0x59CD1DBB, 0xB8879579, 0x86B5D00C, 0xAC8B6D84),
        ),
    ],
)
def test_the_generator_gives_its_authors_words(counter, key, words):
    """These vectors are published with Random123; for numbers and for arrays."""
    assert threefry(counter, key) == words
    arrays = threefry(tuple(np.full(3, word, np.uint32) for word in counter), key)
    assert [array.tolist() for array in arrays] == [[word] * 3 for word in words]


ROWS = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| `(\w+)` \| (-?[\d.]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)


def test_the_numbers_of_the_protocol_s_page():
    assert len(ROWS) >= 5
    for seed, position, token, word, noise in ROWS:
        found = gumbel_of(int(seed), int(position), int(token))
        assert found == pytest.approx(float(noise), abs=5e-10)
        assert math.exp(-math.exp(-found)) * 2**32 == pytest.approx(int(word, 16) + 0.5, rel=1e-9)


def test_an_array_has_the_noise_of_each_token():
    """In any order, twice, dense or sparse."""
    for tokens in ([], [7], [5, 4, 3, 9, 5], list(range(3, 60)), [0, 49_151, 17, 2**34 - 1], [1000, 1001, 1002, 1003]):
        alone = [gumbel_of(11, 1234, token) for token in tokens]
        assert gumbel(11, 1234, tokens) == pytest.approx(alone, abs=1e-12)


def test_the_bounds_are_those_of_the_smallest_and_the_largest_word():
    assert pytest.approx(-3.13, abs=0.01) == LEAST and pytest.approx(22.87, abs=0.01) == MOST
    noise = gumbel(3, 3, range(100_000))
    assert noise.min() > LEAST and noise.max() < MOST


def uniform(seed: int, position: int, tokens: object) -> np.ndarray:
    return np.exp(-np.exp(-gumbel(seed, position, tokens)))


SERIES = {
    "ids": lambda: uniform(0, 0, range(200_000)),
    "one lane": lambda: uniform(0, 0, range(0, 800_000, 4)),
    "positions": lambda: np.concatenate([uniform(7, position, range(20)) for position in range(5000)]),
    "one id over positions": lambda: np.array([uniform(7, position, [42])[0] for position in range(5000)]),
    "one id over seeds": lambda: np.array([uniform(seed, 31, [42])[0] for seed in range(5000)]),
    "one id over high seeds": lambda: np.array([uniform(seed << 32, 31, [42])[0] for seed in range(5000)]),
}


@pytest.mark.parametrize("series", SERIES)
def test_the_noise_is_uniform(series):
    """Chi-square over 64 bins of the whole, and of the lower bits; no correlation with the next, nor the one after."""
    values = SERIES[series]()
    for part in (values, values * 2**20 % 1):
        counts = np.bincount((part * 64).astype(int), minlength=64)
        expected = len(values) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom: one in 100,000
    for lag in (1, 2, 4):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(len(values))


CANDIDATES = [DraftToken(7, math.log(0.6)), DraftToken(8, math.log(0.3)), DraftToken(9, math.log(0.05))]


@pytest.mark.parametrize("cold", [Sampling(), Sampling(-1.0), Sampling(float("nan")), Sampling(0.0, 0.5, 3)])
def test_coupling_changes_nothing_without_a_temperature(cold):
    coupling = GumbelCoupling(cold)
    assert coupling.ranked([CANDIDATES, CANDIDATES[1:]], 9) == [CANDIDATES, CANDIDATES[1:]]
    assert coupling.best([CANDIDATES[1], CANDIDATES[0], DraftToken(3, CANDIDATES[0].logprob)], 9) == CANDIDATES[0]


def test_the_chance_is_a_share_of_probability_and_noise():
    for position in range(20):
        noise = dict(zip((7, 8, 9), gumbel(5, position, (7, 8, 9)), strict=True))
        shares = {each.token: math.exp(each.logprob + TRUST * 0.9 * noise[each.token]) for each in CANDIDATES}
        whole = sum(shares.values()) + 0.05 * math.exp(OTHERS * 0.9**2)
        (ranked,) = GumbelCoupling(Sampling(1.0, 0.9, 5)).ranked([CANDIDATES], position)  # a nucleus is as less heat
        assert [each.token for each in ranked] == sorted(shares, key=lambda token: -shares[token])
        assert {each.token: math.exp(each.logprob) for each in ranked} == pytest.approx(
            {token: share / whole for token, share in shares.items()}
        )


@pytest.mark.parametrize("sampling", [Sampling(float("inf"), 1.0, -1), Sampling(50.0, 9.0, 2**64), Sampling(1.0, -1.0)])
def test_extreme_values_give_finite_chances(sampling):
    for candidates in (CANDIDATES, [DraftToken(1, 0.0), DraftToken(2, -math.inf)]):
        (ranked,) = GumbelCoupling(sampling).ranked([candidates], 3)
        chances = [each.logprob for each in ranked]
        assert sorted(each.token for each in ranked) == sorted(each.token for each in candidates)
        assert (
            not np.isnan(chances).any() and chances == sorted(chances, reverse=True) and sum(np.exp(chances)) <= 1.001
        )


def places(sampling: Sampling, coupling: GumbelCoupling) -> np.ndarray:
    """Return, for 300 positions, the rank of the target's token among 16 candidates (16 if it is none).

    The drafter's logits are the target's plus an error.
    """
    rng, found = np.random.default_rng(4), []
    for position in range(300):
        target = rng.standard_normal(500) * 2.5
        drafter = target + rng.standard_normal(500) * 0.7
        right = int((target / sampling.temperature + gumbel(sampling.seed, position, np.arange(500))).argmax())
        logprobs = drafter - np.logaddexp.reduce(drafter)
        likeliest = np.argsort(-logprobs)[:16].tolist()
        (ranked,) = coupling.ranked([[DraftToken(token, float(logprobs[token])) for token in likeliest]], position)
        tokens = [each.token for each in ranked]
        found.append(tokens.index(right) if right in tokens else 16)
    return np.array(found)


@pytest.mark.parametrize(("temperature", "gained"), [(0.7, 0.15), (1.0, 0.2)])
def test_coupling_finds_more_of_the_target_s_tokens(temperature, gained):
    """Among the first 1, 4 and 8; but not with the noise of another seed."""
    sampling = Sampling(temperature, 1.0, 12)
    plain, coupled, strange = (
        np.array([(places(sampling, coupling) < count).mean() for count in (1, 4, 8)])
        for coupling in (NO_COUPLING, GumbelCoupling(sampling), GumbelCoupling(Sampling(temperature, 1.0, 13)))
    )
    assert coupled[0] > plain[0] + gained and (coupled[1:] > plain[1:] + 0.06).all()
    assert (strange < plain).all()
