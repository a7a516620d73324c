"""What drafts of a shape take and bring: measured on answers of a target, and drawn from in the simulation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from moa_bench.forecast.read import check_counts, check_shares, read_as
from moa_runtime.drafters.base import Prices
from moa_runtime.errors import MoaError
from moa_runtime.session.tree import DraftTree

#: What every result says where no file is named.
MEASURED = Path(__file__).with_name("drafts.json")
_MOST_NODES = 1024  # of a draft: more is no draft of ours
_RIGHT, _WRONG = 0, 1  # tokens: the target's choice at any position, and another


@dataclass(frozen=True)
class Shape:
    """Drafts of one shape, means over many rounds.

    Attributes:
        name: for people.
        nodes, depth: tokens of a draft, and those of its longest path.
        steps: nodes that each step of the drafter continued.
        accepted: of each task, how many rounds accepted 0, 1, 2 ... tokens.
    """

    name: str
    nodes: int
    depth: int
    steps: tuple[int, ...]
    accepted: Mapping[str, Sequence[float]]

    def tau(self, task: str) -> float:
        """Tokens committed by a round."""
        return self._taus[task]

    def draw(self, task: str, rng: random.Random) -> int:
        """Accepted tokens of a round."""
        return rng.choices(range(len(self.accepted[task])), cum_weights=self._weights[task])[0]

    @cached_property
    def _weights(self) -> dict[str, list[float]]:
        return {task: list(accumulate(counts)) for task, counts in self.accepted.items()}

    @cached_property
    def _taus(self) -> dict[str, float]:
        return {task: 1 + _mean(counts) for task, counts in self.accepted.items()}

    def tree(self, accepted: int) -> DraftTree:
        """A draft of this shape, of which so many tokens are right: level by level, a path and what stands beside it.
        A right token is 0, as the target's choice is everywhere."""
        if accepted not in self._trees:
            self._trees[accepted] = self._tree(accepted)
        return self._trees[accepted]

    @cached_property
    def _trees(self) -> dict[int, DraftTree]:
        return {}

    def _tree(self, accepted: int) -> DraftTree:
        depth = max(self.depth, accepted)
        beside, left = max(0, self.nodes - depth), depth
        tokens: list[int] = []
        parents: list[int] = []
        path = 0
        for level in range(depth):
            others = -(-beside // left)
            parents += [path] * (1 + others)
            tokens += [_RIGHT if level < accepted else _WRONG] + [_WRONG] * others
            path = len(tokens) - others
            beside, left = beside - others, left - 1
        return DraftTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), self.steps)


@dataclass(frozen=True)
class Drafts:
    """The shapes that a drafter may choose from; the first one is no draft at all.

    Attributes:
        about: what was measured, for people.
        tasks: of the answers, each with its share of them.
    """

    about: str
    tasks: Mapping[str, float]
    shapes: Sequence[Shape]

    def task(self, rng: random.Random) -> str:
        """Of an answer."""
        return rng.choices(list(self.tasks), list(self.tasks.values()))[0]

    def tau(self, shape: Shape) -> float:
        """Tokens that a round commits, over all tasks' rounds: answers weigh by their lengths."""
        total = sum(self.tasks.values())
        return total / sum(share / shape.tau(task) for task, share in self.tasks.items())

    def chosen(self, prices: Prices, levels: int, task: str) -> Shape:
        """The shape that pays best at the controller's prices (:class:`cost_model.Throughput`): the real
        drafter weighs node by node with what it expects of each, here a shape is weighed as a whole with what it
        brought.

        Args:
            levels: that may be drafted; 0, and only copies are.
        """
        able = [shape for shape in self.shapes if levels or not shape.steps]
        return max(able, key=lambda shape: _worth(shape, prices, task))

    def weaker(self, tau: float) -> Drafts:
        """What a drafter would bring whose largest drafts commit ``tau`` tokens a round: each token of a path is also
        right with a probability, which is the same for all.

        Raises:
            MoaError: more than was measured, or less than a token a round.
        """
        most = self.tau(self.shapes[-1])
        if not 1 < tau <= most:
            raise MoaError(f"a tau above 1 and at most {most:.3f}, which was measured, is expected, not {tau:g}")
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = self._thinned((low + high) / 2)
            if middle.tau(middle.shapes[-1]) < tau:
                low = (low + high) / 2
            else:
                high = (low + high) / 2
        return self._thinned(high)

    def _thinned(self, probability: float) -> Drafts:
        return Drafts(self.about, self.tasks, [_thinned(shape, probability) for shape in self.shapes])

    @classmethod
    def read(cls, path: Path = MEASURED) -> Drafts:
        """Raises MoaError: no such file, or none of this kind."""
        return read_as(path, cls._of, "holds no drafts: expected what moa-bench forecast --record writes")

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Drafts:
        """Raises ValueError, KeyError, TypeError or AttributeError: these are none."""
        shapes = [
            Shape(str(each["name"]), each["nodes"], each["depth"], tuple(each["steps"]), each["accepted"])
            for each in raw["shapes"]
        ]
        drafts = cls(str(raw["about"]), raw["tasks"], shapes)
        check_shares(list(drafts.tasks.values()))
        for shape in shapes:
            check_counts([shape.nodes - shape.depth, shape.depth])
            check_counts(shape.steps, least=1)
            if shape.nodes > _MOST_NODES or not set(drafts.tasks) <= set(shape.accepted):
                raise ValueError(shape.name)
            for counts in shape.accepted.values():
                check_shares(counts)
        if not shapes:
            raise ValueError
        return drafts

    def as_dict(self) -> dict[str, Any]:
        """For :meth:`read`."""
        shapes = [
            {
                "name": shape.name,
                "nodes": shape.nodes,
                "depth": shape.depth,
                "steps": shape.steps,
                "accepted": {task: list(counts) for task, counts in shape.accepted.items()},
            }
            for shape in self.shapes
        ]
        return {"about": self.about, "tasks": dict(self.tasks), "shapes": shapes}


def _mean(counts: Sequence[float]) -> float:
    return sum(length * count for length, count in enumerate(counts)) / sum(counts)


def _worth(shape: Shape, prices: Prices, task: str) -> float:
    """Tokens that a draft brings, less those that its parts cost."""
    cost = len(shape.steps) * prices.step + sum(shape.steps) * prices.query + shape.nodes * prices.node
    return shape.tau(task) - cost


def _thinned(shape: Shape, probability: float) -> Shape:
    accepted = {}
    for task, counts in shape.accepted.items():
        fewer = [0.0] * len(counts)
        for length, count in enumerate(counts):
            for shorter in range(length):
                fewer[shorter] += count * probability**shorter * (1 - probability)
            fewer[length] += count * probability**length
        accepted[task] = fewer
    return replace(shape, accepted=accepted)
