"""What training shows of the memory rows: long futures, and conversations that lose their rows."""

from __future__ import annotations

import random

from moa_drafter.training.batch import FutureLengths, drop_rows, future_lengths_at


class Drawn(random.Random):
    """Draws what it is told."""

    def __init__(self, *numbers: float, last: int = 0) -> None:
        super().__init__()
        self._numbers, self._last = list(numbers), last

    def random(self) -> float:
        return self._numbers.pop(0)

    def randrange(self, *bounds: int) -> int:
        return self._last


def test_the_documented_example() -> None:
    limits = [0, 1, 2, 2, 2, 4, 4]
    assert drop_rows(limits, 0.5, Drawn(0.4, 0.9, last=1)) == [0, 1, 1, 1, 1, 1, 1]
    assert drop_rows(limits, 0.5, Drawn(0.4, 0.1)) == [-1] * 7
    assert drop_rows(limits, 0.5, Drawn(0.6)) == limits


def test_without_a_share_nothing_is_drawn() -> None:
    assert drop_rows([0, 1], 0.0, Drawn()) == [0, 1]


def test_shares_are_kept_and_drawn_alike_for_a_seed() -> None:
    limits = list(range(40))
    drawn = [drop_rows(limits, 0.5, random.Random(seed)) for seed in range(600)]
    assert drawn == [drop_rows(limits, 0.5, random.Random(seed)) for seed in range(600)]
    none = sum(kept[0] == -1 for kept in drawn)
    some = sum(kept[0] == 0 and kept != limits for kept in drawn)
    assert 110 < none < 190 and 110 < some < 190
    for kept in drawn:
        assert kept == [min(limit, kept[-1]) for limit in limits]


def test_what_is_trained_last_reaches_as_far_as_offline_text() -> None:
    for lengths in (future_lengths_at(1.0), future_lengths_at(0.0, continued=True)):
        assert isinstance(lengths, FutureLengths) and lengths.no_rows_share > 0
        longest = max(lengths.draw(random.Random(seed)) for seed in range(4000))
        assert 256 < longest <= 512
