"""Stopping of a drafter that writes offline."""

from __future__ import annotations

import math
import random

import pytest

from moa_runtime.offline_stopping import StoppingRule, repeats

NEVER = 1000


def test_it_continues_while_it_is_sure_up_to_its_limit() -> None:
    rule = StoppingRule(0.5, NEVER, NEVER)
    assert [rule.may_continue([1, 2, 3], 2, math.log(p)) for p in (0.51, 0.5, 0.49)] == [True, True, False]
    assert StoppingRule(0.0, NEVER, NEVER).may_continue([1, 2, 3], 2, -math.inf)
    short = StoppingRule(0.0, NEVER, 3)
    assert short.may_continue([1, 2, 3, 4, 5], 2, -1.0) and not short.may_continue([1, 2, 3, 4, 5], 3, -1.0)
    assert not StoppingRule(0.0, NEVER, 0).may_continue([1, 2], 0, 0.0)


def test_it_stops_in_a_circle() -> None:
    rule = StoppingRule(0.0, 3, NEVER)
    text = [7, 8, 9, 1, 7, 8]
    assert rule.may_continue(text, 2, -1.0)
    assert not rule.may_continue([*text, 9], 3, -1.0)
    assert rule.may_continue([*text, 9], 0, 0.0)  # the target wrote it, not the drafter
    assert rule.may_continue([*text, 5], 3, -1.0)


def test_repeats_is_what_a_plain_search_finds() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(2000):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        length, new = rng.randrange(1, 6), rng.randrange(0, 4)
        joined = "".join(map(str, text))
        expected = bool(new) and len(text) >= length and joined.find(joined[-length:]) < len(joined) - length
        assert repeats(text, length, new) == expected, (text, length, new)
        found += expected
    assert 200 < found < 1800


def test_only_recent_text_counts() -> None:
    phrase = [90001, 90002, 90003]
    filler = list(range(300))
    assert repeats([*phrase, *filler[:250], *phrase], 3, 3)
    assert not repeats([*phrase, *filler, *phrase], 3, 3)


@pytest.mark.parametrize("numbers", [(-0.1, 8, 8), (1.1, 8, 8), (0.5, 0, 8), (0.5, 8, -1)])
def test_numbers_out_of_range_are_refused(numbers: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="StoppingRule"):
        StoppingRule(*numbers)
