"""How many replicas there should be, by how long work waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.replicas.autoscaling import QUEUE, QueuePolicy, stats_of
from moa_server.scheduling.step_cost import Load

LONGEST_S, SHORTEST_S = 0.4, 0.1
POLICY = QueuePolicy(longest_s=LONGEST_S, shortest_s=SHORTEST_S)


def wanted(*waits: float, running: int | None = None, target: int | None = None) -> int:
    """What the policy says where replicas report these waits."""
    running = len(waits) if running is None else running
    context: Any = SimpleNamespace(
        current_num_replicas=running,
        target_num_replicas=running if target is None else target,
        aggregated_metrics={QUEUE: dict(enumerate(waits))},
    )
    count, state = POLICY(context)
    assert state == {}
    return count


@pytest.mark.parametrize(
    ("waits", "count"),
    [
        ([LONGEST_S], 1),
        ([LONGEST_S * 1.01], 2),
        ([LONGEST_S * 1.4, LONGEST_S * 1.4], 3),
        ([LONGEST_S * 100, LONGEST_S * 100], 4),  # twice as many at once, no more
        ([2 * LONGEST_S, 0.0], 2),  # the mean counts
        ([SHORTEST_S, SHORTEST_S], 2),
        ([0.0, SHORTEST_S], 1),
    ],
)
def test_more_where_work_waits_and_fewer_where_it_hardly_does(waits: list[float], count: int):
    assert wanted(*waits) == count


def test_what_is_under_way_is_not_asked_for_again():
    assert wanted(LONGEST_S, running=1, target=2) == 2


def test_without_reports_all_stays():
    assert wanted(running=2, target=3) == 3
    assert wanted(1.0, running=0, target=1) == 1
    context: Any = SimpleNamespace(current_num_replicas=2, target_num_replicas=2, aggregated_metrics=None)
    assert POLICY(context) == (2, {})


def test_an_idle_replica_reports_no_wait_whatever_there_was():
    load = Load()
    load.stepped(queue_s=3.0, step_s=0.1)
    assert stats_of(load.message(answers=1)) == {QUEUE: 3.0}
    assert stats_of(load.message(answers=0)) == {QUEUE: 0.0}
    assert stats_of(wire.Load()) == {QUEUE: 0.0}
