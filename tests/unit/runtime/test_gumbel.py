"""The noise: the published generator, the numbers that the protocol's page gives, and that it looks like noise."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from moa_runtime.drafters.gumbel import LEAST, MOST, gumbel, gumbel_of, threefry

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
    """The vectors that the authors of Threefry publish with Random123, for numbers and for arrays."""
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


def test_many_at_once_are_each_alone():
    """In any order, twice, and whether most of a block is asked for or not."""
    for tokens in ([], [7], [5, 4, 3, 9, 5], list(range(3, 60)), [0, 49_151, 17, 2**34 - 1], [1000, 1001, 1002, 1003]):
        alone = [gumbel_of(11, 1234, token) for token in tokens]
        assert gumbel(11, 1234, tokens) == pytest.approx(alone, abs=1e-12)


def test_all_bits_of_seed_and_position_count():
    seen = {gumbel_of(1 << bit, 5, 8) for bit in range(64)} | {gumbel_of(0, 5 ^ 1 << bit, 8) for bit in range(64)}
    assert len(seen) == 128
    assert gumbel_of(1 << 64, 5, 8) == gumbel_of(0, 5, 8) == gumbel_of(0, 5 + (1 << 64), 8)


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
def test_it_is_uniform(series):
    """Chi-square over 64 bins of the whole, and of the lower bits; no correlation with the next, nor the one after."""
    values = SERIES[series]()
    for part in (values, values * 2**20 % 1):
        counts = np.bincount((part * 64).astype(int), minlength=64)
        expected = len(values) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom: one in 100,000
    for lag in (1, 2, 4):
        correlation = np.corrcoef(values[:-lag], values[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(len(values))


def test_neighbours_are_independent():
    """Seeds, positions and ids one apart: the pairs fill the square evenly."""
    many = range(100_000)
    here = uniform(5, 9, many)
    for other in (uniform(6, 9, many), uniform(5, 10, many), uniform(9, 5, many), uniform(5 + (1 << 32), 9, many)):
        counts = np.bincount((here * 8).astype(int) * 8 + (other * 8).astype(int), minlength=64)
        assert ((counts - len(many) / 64) ** 2 / (len(many) / 64)).sum() < 120
        assert abs(np.corrcoef(here, other)[0, 1]) < 4.5 / math.sqrt(len(many))
