"""Token buckets: what they admit, and what a bearer's budget makes of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moa_server.edge.rate_limits import BURST_SECONDS, Budget, Budgets, Kind, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


amounts = st.floats(0, 1000, allow_subnormal=False)
arrivals = st.lists(st.tuples(st.floats(0, 10, allow_subnormal=False), amounts), min_size=1, max_size=40)


def admitted(rate: float, burst: float, charges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(when it goes on, amount) of charges given as (seconds since the one before, amount)."""
    clock, times = Clock(), []
    bucket = TokenBucket(rate, burst, clock)
    for gap, amount in charges:
        clock.now += gap
        times.append((clock.now + bucket.wait_s(amount), amount))
    return times


@given(st.floats(0.1, 1000), st.floats(0, 1000), arrivals)
def test_no_span_admits_more_than_burst_rate_and_one_charge(rate, burst, charges):
    times = admitted(rate, burst, charges)
    largest = max(amount for _, amount in charges)
    for start, _ in times:
        for end, _ in times:
            within = sum(amount for at, amount in times if start <= at <= end)
            if end >= start:
                assert within <= burst + rate * (end - start) + largest + 1e-6 * (1 + within)


@given(st.floats(0.1, 1000), st.floats(0, 1000), arrivals)
def test_charges_go_on_in_the_order_they_came(rate, burst, charges):
    times = [at for at, _ in admitted(rate, burst, charges)]
    assert all(before <= after + 1e-6 * (1 + after) for before, after in itertools.pairwise(times))


@given(st.floats(0.1, 1000), st.floats(0, 1000), arrivals)
def test_nobody_waits_longer_than_the_debt_before_takes(rate, burst, charges):
    clock = Clock()
    bucket, charged = TokenBucket(rate, burst, clock), 0.0
    for gap, amount in charges:
        clock.now += gap
        assert bucket.wait_s(amount) <= max(0.0, charged - burst) / rate + 1e-6 * (1 + charged / rate)
        charged += amount


def test_a_charge_larger_than_the_burst_is_admitted_and_paid_by_those_behind():
    clock = Clock()
    bucket = TokenBucket(10, 20, clock)
    assert bucket.wait_s(120) == 0
    assert bucket.wait_s(10) == pytest.approx(10)
    assert bucket.wait_s(0) == pytest.approx(11)
    clock.now = 11.0
    assert bucket.wait_s(5) == pytest.approx(0)
    clock.now = 1000.0
    assert [bucket.wait_s(20), bucket.wait_s(20), bucket.wait_s(20)] == pytest.approx([0, 0, 2])


def test_each_kind_has_its_own_bucket_and_none_is_unlimited():
    budgets = Budgets(Budget(frames_per_second=5, row_bytes_per_second=100), Clock())
    assert budgets.wait_s(Kind.FRAMES, 5 * BURST_SECONDS + 5) == 0
    assert budgets.wait_s(Kind.FRAMES, 1) == pytest.approx(1)
    assert budgets.wait_s(Kind.ROW_BYTES, 1) == 0
    assert budgets.wait_s(Kind.PREFILL_TOKENS, 10**9) == budgets.wait_s(Kind.PREFILL_TOKENS, 10**9) == 0


def test_sessions_are_counted():
    budgets = Budgets(Budget(sessions=2), Clock())
    assert [budgets.open_session() for _ in range(3)] == [True, True, False]
    budgets.close_session()
    assert budgets.open_session()
    budgets.change(Budget(sessions=1))
    budgets.close_session()
    assert not budgets.open_session() and budgets.sessions == 1


def test_what_was_not_done_is_given_back():
    bucket = TokenBucket(10, 20, lambda: 0.0)
    for _ in range(5):
        assert bucket.wait_s(100) == 0.0
        bucket.give_back(100)
    assert bucket.wait_s(20) == bucket.wait_s(1) == 0.0
    assert bucket.wait_s(0) > 0
