"""How many replicas Ray Serve should run: by how long work waits for the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from moa_runtime.wire.moa.v1 import session_pb2 as wire

#: What a replica reports: seconds that work waits for its step, a running mean; 0 where nothing is being written.
QUEUE = "queue_s"
_MOST_GROWTH = 2.0


class Context(Protocol):
    """What is used of Ray's ``AutoscalingContext``."""

    current_num_replicas: int
    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """By name of the metric, and by replica."""


def stats_of(load: wire.Load) -> dict[str, float]:
    """What a replica reports of its load."""
    return {QUEUE: load.queue_us / 1e6 if load.answers else 0.0}


class QueuePolicy:
    """The ``policy_function`` of a deployment. Ray applies its delays and bounds to what it says.

    In proportion to the wait, at most twice as many at once, where work waits for too long; one less where it hardly
    does; else as many as there are. Replicas that have not reported yet are not counted.

    Args:
        longest_s, shortest_s: waits, the mean of all replicas, beyond which there should be more of them, and below
            which one less would do; in the file: ``policy_kwargs``.
    """

    def __init__(self, longest_s: float = 0.25, shortest_s: float = 0.05) -> None:
        self._longest_s, self._shortest_s = longest_s, shortest_s

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and nothing to be remembered."""
        waits = list((context.aggregated_metrics or {}).get(QUEUE, {}).values())
        running = context.current_num_replicas
        if not waits or not running:
            return context.target_num_replicas, {}
        wait = sum(waits) / len(waits)
        if wait > self._longest_s:
            return math.ceil(running * min(wait / self._longest_s, _MOST_GROWTH)), {}
        return (running - 1 if wait < self._shortest_s else context.target_num_replicas), {}
