"""Which drafted tokens a step verifies, and how probable they are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from moa_server.scheduling.draft_choice import DraftGain, choose_nodes
from moa_server.scheduling.step_drafts import Calibration


def trees(rng: random.Random) -> tuple[list[list[int]], list[list[float]]]:
    """Make small drafts: parents, and the probability of each path."""
    parents, paths = [], []
    for _ in range(rng.randint(1, 3)):
        own, all_paths = [], [1.0]
        for index in range(rng.randint(0, 4)):
            own.append(rng.randint(0, index))
            all_paths.append(all_paths[own[-1]] * rng.choice([0.1, 0.5, 0.5, 0.9, 1.0]))
        parents.append(own)
        paths.append(all_paths[1:])
    return parents, paths


@pytest.mark.parametrize("least_gain", [1.0, 1.1])
@pytest.mark.parametrize("seed", range(60))
def test_no_other_tokens_bring_more_a_second(seed: int, least_gain: float) -> None:
    rng = random.Random(seed)
    parents, paths = trees(rng)
    stairs = np.cumsum([rng.choice([0.0, 0.1, 1.0]) for _ in range(13)]) + rng.uniform(0.5, 5)
    chosen = choose_nodes(paths, lambda drafted: stairs[drafted], least_gain=least_gain)

    def rate(sets) -> float:
        gains = len(paths) + sum(paths[session][index] for session, own in enumerate(sets) for index in own)
        return gains / stairs[sum(map(len, sets))]

    def subtrees(own: list[int]) -> list[tuple[int, ...]]:
        found = itertools.chain.from_iterable(itertools.combinations(range(len(own)), n) for n in range(len(own) + 1))
        return [nodes for nodes in found if all(not own[node] or own[node] - 1 in nodes for node in nodes)]

    assert all(tuple(nodes) in subtrees(own) for nodes, own in zip(chosen, parents, strict=True))
    best = max(map(rate, itertools.product(*map(subtrees, parents))))
    plain = rate([[]] * len(paths))
    assert rate(chosen) == pytest.approx(best if best >= least_gain * plain else plain)
    assert sum(map(len, choose_nodes(paths, lambda drafted: stairs[drafted], most=2))) <= 2


def test_a_drafter_that_claims_too_much_gains_nothing() -> None:
    honest, boastful, silent, rng = Calibration(), Calibration(), Calibration(), random.Random(1)
    parents = [0, 1, 2]
    assert honest.paths(parents, [0.8, 0.5, 0.5])[0] == pytest.approx(0.85, abs=0.1)
    for _ in range(300):
        path = list(itertools.takewhile(lambda _: rng.random() < 0.6, range(3)))
        honest.learn(parents, [0.6] * 3, range(3), path)
        boastful.learn(parents, [0.99] * 3, range(3), path)
        silent.learn(parents, None, range(3), path)
    for calibration, claims in ((honest, [0.6] * 3), (boastful, [0.99] * 3), (silent, None)):
        assert calibration.paths(parents, claims) == pytest.approx([0.6, 0.36, 0.216], abs=0.12)


@pytest.mark.parametrize("claims", [[1.0] * 62, [0.6] * 62, [0.1, 0.9] * 31, None], ids=str)
def test_siblings_share_a_probability_of_1_however_much_is_claimed(claims: list[float] | None) -> None:
    paths = Calibration().paths([0, *[1] * 61], claims)
    assert sum(paths[1:]) == pytest.approx(paths[0]) and max(paths[1:]) > 0.4 * paths[0] and min(paths) >= 0


def test_tokens_after_a_wrong_one_and_those_not_verified_teach_nothing() -> None:
    calibration = Calibration()
    before = calibration.paths([0, 1], [0.3, 0.9])
    calibration.learn([0, 1], [0.3, 0.9], [0, 1], [])
    after = calibration.paths([0, 1], [0.3, 0.9])
    assert after[0] < before[0] and after[1] / after[0] == pytest.approx(before[1] / before[0])
    calibration.learn([0, 1], [0.3, 0.9], [], [])
    assert calibration.paths([0, 1], [0.3, 0.9]) == after


def test_drafts_of_a_crowd_have_to_be_predicted_better_by_what_predictions_were_too_good() -> None:
    gain, rng = DraftGain(), random.Random(4)
    assert gain.least(1) == 1.0 < gain.least(8) < 1.1, "alone any gain counts, and at first little is known of a crowd"
    for _ in range(400):
        gain.observe(8, 200.0, 180.0 * rng.uniform(0.9, 1.1), drafted=False, modelled=False)
        gain.observe(8, 300.0, 216.0 * rng.uniform(0.8, 1.2), drafted=True, modelled=False)
    assert gain.least(8) == pytest.approx(0.9 / 0.72, rel=0.04) and gain.least(32) < 1.1
    learnt = gain.least(8)
    for _ in range(600):
        gain.observe(8, 200.0, 180.0, drafted=False, modelled=False)
    assert 1.0 < gain.least(8) < learnt - 0.1, "what is no longer tried is forgotten, and tried again"
    gain.observe(1, 1.0, 0.5, drafted=True, modelled=True)
    assert gain.least(1) == gain.least(1, modelled=True) == 1.0 < gain.least(8) < gain.least(32, modelled=True)
