"""Guessing with the target's noise: better guesses, and chances that hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.gumbel import NO_COUPLING, OTHERS, TRUST, GumbelCoupling, gumbel
from moa_runtime.drafters.ngram import WEIGHTS, NgramDrafter, NgramMixture
from moa_runtime.session.events import Sampling

CANDIDATES = [DraftToken(7, math.log(0.6)), DraftToken(8, math.log(0.3)), DraftToken(9, math.log(0.05))]
WARM = Sampling(1.0, 1.0, 5)


@pytest.mark.parametrize("cold", [Sampling(), Sampling(-1.0), Sampling(float("nan")), Sampling(0.0, 0.5, 3)])
def test_without_a_temperature_nothing_is_changed(cold):
    coupling = GumbelCoupling(cold)
    assert coupling.ranked([CANDIDATES, CANDIDATES[1:]], 9) == [CANDIDATES, CANDIDATES[1:]]
    assert coupling.best([CANDIDATES[1], CANDIDATES[0], DraftToken(3, CANDIDATES[0].logprob)], 9) == CANDIDATES[0]


def test_a_low_temperature_changes_little():
    (ranked,) = GumbelCoupling(Sampling(1e-4, 1.0, 5)).ranked([CANDIDATES], 9)
    assert [candidate.token for candidate in ranked] == [7, 8, 9]
    assert np.exp([candidate.logprob for candidate in ranked]) == pytest.approx([0.6, 0.3, 0.05], abs=1e-3)


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


def test_alternatives_are_ranked_each_by_itself_and_the_best_is_the_first():
    coupling = GumbelCoupling(WARM)
    for position in range(50):
        both = coupling.ranked([CANDIDATES, CANDIDATES[1:], CANDIDATES[:1]], position)
        assert both == [coupling.ranked([each], position)[0] for each in (CANDIDATES, CANDIDATES[1:], CANDIDATES[:1])]
        best = coupling.best(CANDIDATES, position)
        assert best.token == both[0][0].token and best.logprob == pytest.approx(both[0][0].logprob)


@pytest.mark.parametrize("sampling", [Sampling(float("inf"), 1.0, -1), Sampling(50.0, 9.0, 2**64), Sampling(1.0, -1.0)])
def test_extreme_values_give_finite_chances(sampling):
    for candidates in (CANDIDATES, [DraftToken(1, 0.0), DraftToken(2, -math.inf)]):
        (ranked,) = GumbelCoupling(sampling).ranked([candidates], 3)
        chances = [each.logprob for each in ranked]
        assert sorted(each.token for each in ranked) == sorted(each.token for each in candidates)
        assert (
            not np.isnan(chances).any() and chances == sorted(chances, reverse=True) and sum(np.exp(chances)) <= 1.001
        )


def guessed(sampling: Sampling, coupling: GumbelCoupling) -> tuple[np.ndarray, np.ndarray]:
    """Of 1,000 positions: the place of the target's token among 16 candidates, 16 where it is none, and the chance of
    the first. The drafter's logits are the target's and an error."""
    rng = np.random.default_rng(4)
    places, chances = [], []
    for position in range(1000):
        target = rng.standard_normal(500) * 2.5
        drafter = target + rng.standard_normal(500) * 0.7
        scores = target / sampling.temperature + gumbel(sampling.seed, position, np.arange(500))
        logprobs = drafter - np.logaddexp.reduce(drafter)
        likeliest = np.argsort(-logprobs)[:16].tolist()
        (ranked,) = coupling.ranked([[DraftToken(token, float(logprobs[token])) for token in likeliest]], position)
        tokens = [each.token for each in ranked]
        right = int(scores.argmax())
        places.append(tokens.index(right) if right in tokens else 16)
        chances.append(math.exp(ranked[0].logprob))
    return np.array(places), np.array(chances)


@pytest.mark.parametrize(("temperature", "gained"), [(0.7, 0.15), (1.0, 0.2)])
def test_coupling_finds_more_of_the_target_s_tokens(temperature, gained):
    """Among the first 1, 4 and 8; but not with the noise of another seed."""
    sampling = Sampling(temperature, 1.0, 12)
    plain, coupled, strange = (
        np.array([(guessed(sampling, coupling)[0] < count).mean() for count in (1, 4, 8)])
        for coupling in (NO_COUPLING, GumbelCoupling(sampling), GumbelCoupling(Sampling(temperature, 1.0, 13)))
    )
    assert coupled[0] > plain[0] + gained and (coupled[1:] > plain[1:] + 0.06).all()
    assert (strange < plain).all()


def test_the_likelier_guesses_are_right_more_often():
    places, chances = guessed(WARM, GumbelCoupling(WARM))
    right, order = places == 0, np.argsort(chances)
    shares = [right[part].mean() for part in np.array_split(order, 4)]
    assert shares == sorted(shares) and shares[-1] > shares[0] + 0.4


# -- in drafters -----------------------------------------------------------------------------------


def test_copies_are_chosen_with_the_noise_of_their_position():
    """After 9 and 1 came 2, and then 3: which of them is drafted depends on the noise, how likely it is too."""
    text = [9, 1, 2, 9, 1, 3, 9, 1]
    mixture = NgramMixture()
    mixture.confirm(text)
    seen = set()
    for seed in range(20):
        coupling = GumbelCoupling(Sampling(1.0, 1.0, seed))
        copy = mixture.copy(text, coupling)
        assert copy == next(mixture.copies(text[-4:], coupling, len(text) - 4))
        tree = NgramDrafter().propose(text, Budget.chain(1, 1), Sampling(1.0, 1.0, seed))
        assert tree.tokens == (copy.token,) and tree.scores[0] == pytest.approx(copy.logprob)
        seen.add(copy.token)
    assert seen == {2, 3}
    assert mixture.copy(text) == DraftToken(3, pytest.approx(math.log(WEIGHTS[2] / 1.7)))
