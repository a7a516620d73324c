"""Which drafted tokens a step verifies, and how probable they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from moa_runtime.session.events import Sampling
from moa_server.scheduling.draft_choice import DraftGain, DraftSearch, choose_nodes
from moa_server.scheduling.step_drafts import Calibration
from moa_server.scheduling.verify_job import Job


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


def judged(verified: Iterable[int], path: Sequence[int], choice: int = 0) -> Job:
    """A job whose target has judged a draft."""
    job = Job(1, [0], Sampling())
    job.verified, job.path, job.token = list(verified), tuple(path), choice
    return job


def test_a_drafter_that_claims_too_much_gains_nothing() -> None:
    honest, boastful, silent, rng = Calibration(), Calibration(), Calibration(), random.Random(1)
    parents = [0, 1, 2]
    assert honest.paths(parents, [0.8, 0.5, 0.5])[0] == pytest.approx(0.85, abs=0.1)
    for _ in range(300):
        path = list(itertools.takewhile(lambda _: rng.random() < 0.6, range(3)))
        verdict = judged(range(3), path)
        honest.learn([1] * 3, parents, [0.6] * 3, verdict)
        boastful.learn([1] * 3, parents, [0.99] * 3, verdict)
        silent.learn([1] * 3, parents, None, verdict)
    for calibration, claims in ((honest, [0.6] * 3), (boastful, [0.99] * 3), (silent, None)):
        assert calibration.paths(parents, claims) == pytest.approx([0.6, 0.36, 0.216], abs=0.12)


@pytest.mark.parametrize("claims", [[1.0] * 62, [0.6] * 62, [0.1, 0.9] * 31, None], ids=str)
def test_siblings_share_a_probability_of_1_however_much_is_claimed(claims: list[float] | None) -> None:
    paths = Calibration().paths([0, *[1] * 61], claims)
    assert sum(paths[1:]) == pytest.approx(paths[0]) and max(paths[1:]) > 0.4 * paths[0] and min(paths) >= 0


def test_tokens_after_a_wrong_one_teach_nothing_and_all_after_a_right_one_do() -> None:
    calibration = Calibration()
    before = calibration.paths([0, 1], [0.3, 0.9])
    calibration.learn([5, 6], [0, 1], [0.3, 0.9], judged([0, 1], [], 7))
    after = calibration.paths([0, 1], [0.3, 0.9])
    assert after[0] < before[0] and after[1] / after[0] == pytest.approx(before[1] / before[0])
    calibration.learn([5, 6], [0, 1], [0.3, 0.9], judged([], [], 5))  # left out, and the target's choice
    assert calibration.paths([0, 1], [0.3, 0.9])[0] > after[0]


def test_long_wrong_drafts_are_not_trusted_for_long_after_right_ones() -> None:
    """The bin of a first token changes with each wrong draft, and the tokens after it are never judged."""
    calibration, parents, wasted = Calibration(), list(range(200)), 0
    for claims in [[(index % 10 + 0.5) / 10 for index in parents]] * 3:
        calibration.learn([1] * 200, parents, claims, judged(parents, parents))
    for turn in range(40):
        claims = [(turn % 10 + 0.5) / 10, *[0.95] * 199]
        verified = [index for index, path in enumerate(calibration.paths(parents, claims)) if path > 0.2]
        wasted += len(verified)
        calibration.learn([1] * 200, parents, claims, judged(verified, [], 2))
    assert 200 <= wasted < 3000, "without the share of accepted tokens all 8,000 are verified"
    distrusted = calibration.paths([0], [0.85])[0]
    for _ in range(600):  # too improbable to be verified
        calibration.learn([1], [0], [0.85], judged([], [], 1))
    assert calibration.paths([0], [0.85])[0] > 0.8 > 2 * distrusted


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


#: Seconds that a search for drafts takes, and all else between two steps; sums of them are exact.
SEARCH_S, ELSE_S = 2**-8, 2**-10


def looking(search: DraftSearch, spared_s: list[float], sessions: int, first_rest_s: float = ELSE_S) -> list[bool]:
    """Say for each step whether a crowd looked for drafts.

    Args:
        spared_s: by the drafts of each step.
        first_rest_s: what the first step without a search takes.
    """
    looked: list[bool] = []
    for search.steps, spared in enumerate(spared_s):
        searched = search.pays(sessions)
        rest_s = ELSE_S if False in looked else first_rest_s
        search.observe(sessions, spared - SEARCH_S - ELSE_S if searched else -rest_s, searched=searched)
        looked.append(searched)
    return looked


@pytest.mark.parametrize(("spared", "share"), [(0.0, 1 / 8), (0.5, 1 / 8), (1.0, 63 / 64)])
def test_a_crowd_looks_for_drafts_if_they_spare_as_much_as_the_search_takes(spared: float, share: float) -> None:
    search = DraftSearch()
    looked = looking(search, [spared * SEARCH_S] * 1024, 5)
    assert sum(looked[-512:]) == share * 512
    assert all(looked[:32]) and not any(looked[32:40]), "both are tried"
    search.steps = 40  # no trial
    assert search.pays(1) and search.pays(9)  # nothing is known of as many
    assert all(looking(search, [0.0] * 1024, 1))


def test_a_crowd_whose_drafts_have_become_right_looks_for_them_again() -> None:
    looked = looking(DraftSearch(), [0.0] * 640 + [0.01] * 1408, 4)
    assert sum(looked[576:640]) == 8
    assert sum(looked[-512:]) == 512 - 8


def test_a_stall_while_a_crowd_rests_is_no_reason_to_look_for_drafts_for_ever() -> None:
    looked = looking(DraftSearch(), [0.0] * 2048, 4, 0.05)
    assert all(looked[64:512]) and sum(looked[-512:]) == 64
