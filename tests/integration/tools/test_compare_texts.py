"""Comparing two engines: where they differ, by how little, and that all of an answer is compared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from compare_texts import Comparison, compare, nearness
from moa_runtime.session.events import Sampling
from moa_server.engine.sampling import choose
from support.toy_engine import ToyEngine

PROMPTS = [[3, 4, 5], [7]]


class Straying(ToyEngine):
    """A toy that chooses another token at some positions."""

    def __init__(self, strays) -> None:
        super().__init__()
        self.strays = strays

    def choice(self, prefix, seed=0):
        token = super().choice(prefix, seed)
        return token % 49 + 1 if len(prefix) in self.strays else token


def compared(strays, difference: float = 0.0004) -> Comparison:
    """Compare a toy with one that strays to a token whose logit is smaller by ``difference``."""

    def logits(text):
        found = np.zeros(50, np.float32)
        expected = ToyEngine().choice(text)
        found[[expected, expected % 49 + 1]] = 1.0, 1.0 - difference
        return found

    return compare(PROMPTS, (ToyEngine(), Straying(strays)), logits, Sampling(), 40)


def test_every_difference_is_found_and_the_text_after_it_is_compared_too():
    assert compared(()) == Comparison(2, 80, [])
    found = compared((5, 6, 30)).differences
    expected = [*((0, at - 3) for at in (5, 6, 30)), *((1, at - 1) for at in (5, 6, 30))]
    assert [(each.question, each.position) for each in found] == expected
    assert all(each.found == each.expected % 49 + 1 for each in found)
    assert {(each.nearness, each.beyond_rounding) for each in found} == {(1e-3, False)}
    assert all(each.beyond_rounding for each in compared((5,), 0.004).differences)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 1.0, 3), Sampling(1.0, 0.6, 5)])
def test_nearness_of_a_choice(sampling):
    logits = np.random.default_rng(0).normal(size=60).astype(np.float32) * 3
    chosen = choose(logits, sampling, 9)
    assert nearness(logits, sampling, 9, chosen, random.Random(0)) == 1e-5
    assert nearness(logits, sampling, 9, int(logits.argmin()), random.Random(0)) is None
