"""Autoscaling for Ray Serve by the queueing time of work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from moa_runtime.wire.moa.v1 import session_pb2 as wire

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

#: Metric of a replica: running mean of the queueing time in seconds; 0 if it serves no answer.
QUEUE = "queue_s"
_MOST_GROWTH = 2.0


def stats_of(load: wire.Load) -> dict[str, float]:
    """Return the metrics of a replica's load."""
    return {QUEUE: load.queue_us / 1e6 if load.answers else 0.0}


class QueuePolicy:
    """The ``policy_function`` of a deployment. Ray applies its delays and bounds to the result.

    If work waits too long, the number grows in proportion to the wait, at most twofold at once; if it hardly waits, the
    number shrinks by one; otherwise it stays. Replicas that have not reported yet are not counted.

    Args:
        longest_s, shortest_s: mean waits of all replicas above which there should be more, and below which one less is
            enough; in the configuration file: ``policy_kwargs``.
    """

    def __init__(self, longest_s: float = 0.25, shortest_s: float = 0.05) -> None:
        self._longest_s, self._shortest_s = longest_s, shortest_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and no state."""
        waits = list((context.aggregated_metrics or {}).get(QUEUE, {}).values())
        running = context.current_num_replicas
        if not waits or not running:
            return context.target_num_replicas, {}
        wait = sum(waits) / len(waits)
        if wait > self._longest_s:
            return math.ceil(running * min(wait / self._longest_s, _MOST_GROWTH)), {}
        return (running - 1 if wait < self._shortest_s else context.target_num_replicas), {}
