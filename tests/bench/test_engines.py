"""Two engines compared: where they differ, by how little, and that all of an answer is compared."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moa_bench.cli import main
from moa_bench.engines import present
from moa_bench.engines.measure import Results, compare
from moa_bench.engines.nearness import nearness
from moa_bench.prompts import Prompt
from moa_runtime import extras
from moa_runtime.session.sampling import Sampling
from moa_server.sampling import choose
from toy_engine import ToyEngine

PROMPTS = [Prompt("", [3, 4, 5]), Prompt("", [7])]


class Straying(ToyEngine):
    """A toy that chooses another token at some positions."""

    def __init__(self, strays) -> None:
        super().__init__()
        self.strays = strays

    def choice(self, prefix, seed=0):
        token = super().choice(prefix, seed)
        return token % 49 + 1 if len(prefix) in self.strays else token


def compared(strays) -> Results:
    def logits(text):
        found = np.zeros(50, np.float32)
        expected = ToyEngine().choice(text)
        found[[expected, expected % 49 + 1]] = 1.0, 1.0 - 0.0004
        return found

    results = Results()
    compare(PROMPTS, (ToyEngine(), Straying(strays)), logits, Sampling(), 40, results)
    return results


def test_engines_that_agree_have_no_places():
    results = compared(())
    assert (results.questions, results.tokens, results.places) == (2, 80, [])


def test_every_place_is_found_and_the_text_behind_it_is_compared_too():
    results = compared((5, 6, 30))
    assert [(place.question, place.position) for place in results.places] == [
        *((0, at - 3) for at in (5, 6, 30)),
        *((1, at - 1) for at in (5, 6, 30)),
    ]
    assert all(place.found == place.expected % 49 + 1 for place in results.places)
    assert {place.nearness for place in results.places} == {1e-3}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 1.0, 3), Sampling(1.0, 0.6, 5)])
def test_how_near_a_choice_was(sampling):
    logits = np.random.default_rng(0).normal(size=60).astype(np.float32) * 3
    chosen = choose(logits, sampling, 9)
    assert nearness(logits, sampling, 9, chosen, random.Random(0)) == 1e-5
    assert nearness(logits, sampling, 9, int(logits.argmin()), random.Random(0)) is None


def test_tables_list_the_places():
    places = [
        {"question": 1, "position": 2, "expected": 3, "found": 4, "nearness": 1e-4},
        {"question": 1, "position": 7, "expected": 3, "found": 4, "nearness": None},
    ]
    summary = {"questions": 2, "tokens": 80, "places": places, "beyond_rounding": 1}
    compared, listed = present.tables({"samplings": {"greedy": summary}})
    assert compared.rows == [["greedy", 2, 80, 2, 1]]
    assert [row[-1] for row in listed.rows] == ["0.0001", "-"]


def test_without_vllm_the_install_is_named(monkeypatch, capsys):
    monkeypatch.setitem(extras.MODULES, "vllm", ("no_such_package",))
    assert main(["engines"]) == 2
    assert 'pip install "moa-edge[vllm]"' in capsys.readouterr().err
