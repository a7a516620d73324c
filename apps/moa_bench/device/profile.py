"""Where the time of a drafting step goes: operator by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moa_bench.result import rounded

_TOP_NODES = 10


@dataclass(frozen=True)
class NodeTime:
    """One operator of the graph as it ran, and the milliseconds of a step spent in it."""

    name: str
    op: str
    ms: float


@dataclass(frozen=True)
class Profile:
    """Times of a step while it was watched, which is slower than unwatched: read them as shares. Means over the
    faster half of the steps, so that they add up and leave out what else the machine was doing.

    Attributes:
        nodes: in the order in which they ran; what is missing to ``step_ms`` is spent between them.
    """

    step_ms: float
    nodes: Sequence[NodeTime]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: operators by type, and the most expensive nodes; the most expensive first."""
        by_op: dict[str, list[float]] = defaultdict(list)
        for node in self.nodes:
            by_op[node.op].append(node.ms)
        operators = sorted(by_op.items(), key=lambda item: sum(item[1]), reverse=True)
        top = sorted(self.nodes, key=lambda node: node.ms, reverse=True)[:_TOP_NODES]
        return {
            "step_ms": rounded(self.step_ms),
            "between_nodes_ms": rounded(self.step_ms - sum(node.ms for node in self.nodes)),
            "operators": [{"op": op, "nodes": len(ms), **self._figures(sum(ms))} for op, ms in operators],
            "top_nodes": [{"name": node.name, "op": node.op, **self._figures(node.ms)} for node in top],
        }

    def _figures(self, ms: float) -> dict[str, float | None]:
        return {"ms": rounded(ms), "share": rounded(ms / self.step_ms)}
