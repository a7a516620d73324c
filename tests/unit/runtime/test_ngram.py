"""The n-gram index, its drafter, and its mixture with a drafter's candidates."""

from __future__ import annotations

import math
import random
from itertools import islice
from pathlib import Path

import pytest

from moa_runtime.datastore import Datastore, write_datastore
from moa_runtime.drafters import ngram
from moa_runtime.drafters.base import Budget, DraftToken, Prices
from moa_runtime.drafters.ngram import WEIGHTS, WORTH_COPYING, Match, NgramDrafter, NgramIndex, NgramMixture


def index_of(text: list[int], stop_tokens=()) -> NgramIndex:
    index = NgramIndex(stop_tokens)
    index.update(text)
    return index


def test_an_index_that_was_updated_equals_a_new_one() -> None:
    """After any text: longer, shorter, or another."""
    rng = random.Random(0)
    index = NgramIndex(stop_tokens=[0])
    for _ in range(200):
        kept = index._text[: rng.randrange(len(index._text) + 1)]
        text = kept + [rng.randrange(4) for _ in range(rng.randrange(12))]
        index.update(text)
        fresh = index_of(text, stop_tokens=[0])
        for _ in range(10):
            asked = [rng.randrange(4) for _ in range(rng.randrange(7))]
            assert index.match(asked) == fresh.match(asked)
            assert fresh.match(asked) == looked_up(text, asked, stop_tokens=[0])


def looked_up(text: list[int], asked: list[int], stop_tokens: list[int]) -> Match | None:
    """Return the same by a plain search."""
    for length in range(min(16, len(asked)), 0, -1):
        ends = [at for at in range(length, len(text)) if text[at - length : at] == asked[len(asked) - length :]]
        followers = [text[at] for at in ends if text[at] not in stop_tokens]
        if followers:
            weights = {token: 0.0 for token in reversed(followers[-8:])}
            for age, token in enumerate(reversed(followers[-8:])):
                weights[token] += 0.7**age
            return Match(length, {token: weight / sum(weights.values()) for token, weight in weights.items()})
    return None


# -- drafting with it alone ------------------------------------------------------------------------


def test_copies_take_no_step_and_need_no_level() -> None:
    """They continue while they and the text before them are likely enough."""
    text = [*range(1, 60), *range(1, 20)]
    lengths = []
    for logprob in (0.0, math.log(0.5), math.log(WORTH_COPYING)):
        tree = NgramDrafter().propose(text, Budget(nodes=1024, levels=0, logprob=logprob))
        assert tree.tokens == tuple(range(20, 20 + len(tree.tokens))) and not tree.steps
        lengths.append(len(tree.tokens))
        following = WEIGHTS[16] ** (lengths[-1] + 1) * math.exp(logprob)
        assert following < WORTH_COPYING <= WEIGHTS[16] ** lengths[-1] * math.exp(logprob) * (1 + 1e-9)
    assert lengths[0] > lengths[1] > lengths[2] == 0
    assert len(NgramDrafter().propose(text, Budget(nodes=3, levels=0)).tokens) == 3
    assert len(NgramDrafter().propose(text, Budget(nodes=9, levels=0, depth=2)).tokens) == 2


def test_only_likely_copies_follow_the_levels_and_costly_ones_come_first_or_not_at_all() -> None:
    text = [1, 2, 3, 1]  # what follows matches a token, then two
    assert len(NgramDrafter().propose(text, Budget.chain(3)).tokens) == 3
    assert len(NgramDrafter().propose(text, Budget.chain(0)).tokens) == 1
    assert len(NgramDrafter().propose(text, Budget(9, 3, prices=Prices(node=0.5))).tokens) == 1


# -- mixing ----------------------------------------------------------------------------------------

CANDIDATES = [DraftToken(7, math.log(0.6)), DraftToken(8, math.log(0.3))]


def mixture_of(text: list[int]) -> NgramMixture:
    mixture = NgramMixture()
    mixture.confirm(text)
    return mixture


def shares(candidates: list[DraftToken]) -> dict[int, float]:
    return {candidate.token: math.exp(candidate.logprob) for candidate in candidates}


def test_probabilities_are_interpolated() -> None:
    """After 1 2 came 8 (weight 1) and, before that, 5 (0.7); two tokens matched."""
    text = [1, 2, 5, 1, 2, 8, 1, 2]
    weight = WEIGHTS[2]
    mixed = mixture_of(text).mix(CANDIDATES, text)
    assert shares(mixed) == pytest.approx(
        {7: 0.6 * (1 - weight), 8: 0.3 * (1 - weight) + weight / 1.7, 5: 0.7 * weight / 1.7}
    )
    assert [candidate.logprob for candidate in mixed] == sorted((c.logprob for c in mixed), reverse=True)


def test_a_candidate_of_probability_0_is_dropped() -> None:
    text = [1, 2, 1]
    assert shares(mixture_of(text).mix([DraftToken(7, -math.inf)], text)) == pytest.approx({2: WEIGHTS[1]})


def test_a_row_of_copies_exceeds_the_reach_a_single_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "REACH", 2)
    text = [1, 2, 3, 4, 5, 1]
    mixture = mixture_of(text)
    assert mixture.copy([*text, 2]) == DraftToken(3, math.log(WEIGHTS[2]))
    assert mixture.copy([*text, 2, 3]) is None
    assert [copy.token for copy in islice(mixture.copies([*text, 2, 3]), 5)] == [4, 5, 1, 2, 3]


# -- a datastore beside the conversation -------------------------------------------------------------


def test_the_source_with_the_longer_suffix_counts(tmp_path: Path) -> None:
    """The datastore's tokens are added if its suffix is longer than the conversation's."""
    write_datastore(tmp_path / "texts", [[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 9]], "t")
    store = Datastore.open(tmp_path / "texts", "t")

    def copied_from_both(conversation: list[int], path: list[int]) -> tuple[int, float] | None:
        mixture = NgramMixture([0], datastore=store)
        mixture.confirm(conversation)
        copy = mixture.copy(path)
        return None if copy is None else (copy.token, round(math.exp(copy.logprob), 3))

    text = [1, 2, 3, 4, 5]
    assert copied_from_both([], text[:0]) is None
    assert copied_from_both([7, 7, 7], text[2:]) is None  # three tokens are too few
    assert copied_from_both([7, 7, 7], text) == (9, 0.07)
    both = copied_from_both([7, 5, 8, 7], text)  # five tokens there, one here, which has more weight all the same
    assert both == (8, round((1 - 0.07) * WEIGHTS[1], 3))
    assert copied_from_both([*text, 8], text) == (8, WEIGHTS[5])  # as long here
    mixture = NgramMixture(datastore=store)
    mixed = mixture.mix([DraftToken(6, math.log(0.5)), DraftToken(9, math.log(0.25))], text)
    assert [candidate.token for candidate in mixed] == [6, 9]
    assert math.exp(mixed[1].logprob) == pytest.approx(0.93 * 0.25 + 0.07)


def test_ends_of_turns_are_not_copied_from_a_datastore(tmp_path: Path) -> None:
    write_datastore(tmp_path / "texts", [[1, 2, 3, 4, 0]], "t")
    mixture = NgramMixture([0], datastore=Datastore.open(tmp_path / "texts", "t"))
    assert mixture.copy([1, 2, 3, 4]) is None
