"""Leading items that two sequences share."""

from __future__ import annotations

import random

import pytest

from moa_runtime.tokens import common_length


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ("tea", "teapot", 3),
        ("", "ten", 0),
        ([1, 2, 3], (1, 2, 3, 4), 3),
        (range(5), [0, 1, 2, 9], 3),
        (["t", "e", "a"], "ten", 2),
        ([{"role": "user"}, {"role": "system"}], [{"role": "user"}, {"role": "user"}], 1),
    ],
)
def test_sequences_of_any_kind_are_compared(a, b, common: int) -> None:
    assert common_length(a, b) == common_length(b, a) == common


def test_a_difference_is_found_at_any_place() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a = [rng.randrange(3) for _ in range(rng.randrange(40))]
        b = a[: rng.randrange(len(a) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(10))]
        plainly = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_length(a, b) == common_length(tuple(a), b) == plainly
