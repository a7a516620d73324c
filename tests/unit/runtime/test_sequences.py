"""The common prefix of sequences."""

from __future__ import annotations

import random

import pytest

from moa_runtime.tokens import common_length


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ("tea", "ten", 2),
        ("", "ten", 0),
        ("tea", "teapot", 3),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [4, 2, 3], 0),
        ((1, 2, 3, 4), (1, 2, 5), 2),
        ([1, 2, 3], (1, 2, 3, 4), 3),
        ((7,), [8], 0),
        ((), [], 0),
        (range(5), [0, 1, 2, 9], 3),
        (["t", "e", "a"], "ten", 2),
        ([{"role": "user"}, {"role": "system"}], [{"role": "user"}, {"role": "user"}], 1),
    ],
)
def test_equal_leading_items_are_counted(a, b, common: int) -> None:
    assert common_length(a, b) == common_length(b, a) == common


def test_sequences_may_differ_at_any_place() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a = [rng.randrange(3) for _ in range(rng.randrange(40))]
        b = a[: rng.randrange(len(a) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(10))]
        plainly = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_length(a, b) == common_length(tuple(a), b) == common_length(tuple(a), tuple(b)) == plainly
        assert common_length("".join(map(str, a)), "".join(map(str, b))) == plainly
