"""Token buckets: what they admit, and how they limit a bearer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_server.edge.rate_limits import BURST_SECONDS, Budget, Budgets, Kind, TokenBucket


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


amounts = st.floats(0, 1000, allow_subnormal=False)
arrivals = st.lists(st.tuples(st.floats(0, 10, allow_subnormal=False), amounts), min_size=1, max_size=40)


@given(st.floats(0.1, 1000), st.floats(0, 1000), arrivals)
def test_a_bucket_admits_its_burst_its_rate_and_one_charge_in_order(rate, burst, charges):
    """``charges`` are (seconds since the one before, amount)."""
    clock, times, charged = Clock(), [], 0.0
    bucket, largest = TokenBucket(rate, burst, clock), max(amount for _, amount in charges)
    for gap, amount in charges:
        clock.now += gap
        wait_s = bucket.wait_s(amount)
        assert wait_s <= max(0.0, charged - burst) / rate + 1e-6 * (1 + charged / rate), "longer than the debt takes"
        charged += amount
        times.append((clock.now + wait_s, amount))
    assert all(before <= after + 1e-6 * (1 + after) for (before, _), (after, _) in itertools.pairwise(times))
    for start, _ in times:
        for end, _ in times:
            within = sum(amount for at, amount in times if start <= at <= end)
            if end >= start:
                assert within <= burst + rate * (end - start) + largest + 1e-6 * (1 + within)


def test_a_charge_larger_than_the_burst_is_admitted_and_paid_by_later_ones():
    clock = Clock()
    bucket = TokenBucket(10, 20, clock)
    assert [bucket.wait_s(120), bucket.wait_s(10), bucket.wait_s(0)] == pytest.approx([0, 10, 11])
    clock.now = 11.0
    assert bucket.wait_s(5) == pytest.approx(0)
    clock.now = 1000.0
    assert [bucket.wait_s(20), bucket.wait_s(20), bucket.wait_s(20)] == pytest.approx([0, 0, 2])
    clock.now = 2000.0
    for _ in range(5):
        assert bucket.wait_s(100) == 0.0
        bucket.give_back(100)  # work that was not done
    assert bucket.wait_s(20) == bucket.wait_s(1) == 0.0 < bucket.wait_s(0)


def test_each_kind_has_its_own_bucket_and_none_is_unlimited():
    budgets = Budgets(Budget(frames_per_second=5, row_bytes_per_second=100), Clock())
    assert budgets.wait_s(Kind.FRAMES, 5 * BURST_SECONDS + 5) == 0
    assert budgets.wait_s(Kind.FRAMES, 1) == pytest.approx(1)
    assert budgets.wait_s(Kind.ROW_BYTES, 1) == 0
    assert budgets.wait_s(Kind.PREFILL_TOKENS, 10**9) == budgets.wait_s(Kind.PREFILL_TOKENS, 10**9) == 0


def test_sessions_are_counted():
    budgets = Budgets(Budget(), Clock())
    assert [budgets.open_session(2) for _ in range(3)] == [True, True, False]
    budgets.close_session()
    assert budgets.open_session(2)
    budgets.close_session()
    assert not budgets.open_session(1) and budgets.sessions == 1
