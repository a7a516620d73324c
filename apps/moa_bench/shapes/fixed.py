"""What drafts of always the same shape bring at any pace: their rounds do not depend on time."""

from __future__ import annotations

from dataclasses import dataclass

from moa_bench.pace import Pace
from moa_bench.shapes.replay import Replay, hold
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.events import Pushed, RoundEnded

_ANY = Pace(0.0, 0.0, 0.0, 0.0, 0.0)
_NOTHING = Budget.chain(0, nodes=0)
SHAPES = (
    _NOTHING,
    *(Budget.chain(levels) for levels in range(17)),
    *(Budget.tree(nodes, 1) for nodes in (2, 4, 8)),
    *(
        Budget.tree(nodes, levels, width)
        for width, sizes in ((2, (4, 8, 16, 32)), (4, (8, 16, 32, 62)), (10, (16, 32, 62)))
        for levels in (2, 3, 4, 6, 8, 12, 16)
        for nodes in sizes
        if levels <= nodes
    ),
)


def kind_of(shape: Budget) -> str:
    """``"nothing"``, ``"copies"``, ``"chain"`` or ``"tree"``."""
    if not shape.nodes:
        return "nothing"
    return "tree" if shape.branches else "chain" if shape.levels else "copies"


def name_of(shape: Budget) -> str:
    """For people."""
    kind = kind_of(shape)
    if kind == "tree":
        return f"tree of {shape.nodes} in {shape.levels} levels, {shape.width} wide"
    return f"chain of {shape.levels}" if kind == "chain" else kind


@dataclass(frozen=True)
class Work:
    """What so many tokens took, all rounds together.

    Attributes:
        steps, queries: of the drafter.
        passes, nodes: of the target, and the drafted tokens that they were over.
    """

    tokens: int = 0
    steps: int = 0
    queries: int = 0
    passes: int = 0
    nodes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.queries + other.queries,
            self.passes + other.passes,
            self.nodes + other.nodes,
        )

    def rate(self, pace: Pace) -> float:
        """Tokens a second."""
        drafting = self.steps * pace.step_s + self.queries * pace.query_s
        waiting = self.passes * (pace.round_trip_s + pace.compute_s(1)) + self.nodes * pace.token_s
        return self.tokens / (drafting + waiting)


class Counting:
    """A controller that counts what its rounds take. Implements :class:`draft_controllers.Controller`.

    Attributes:
        work: so far, without the prompts.
        branched: drafts that had branches.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.work, self.branched = Work(), 0

    def budget(self) -> Budget:
        return self._controller.budget()

    def ahead(self, drafted: int, probability: float) -> bool:
        return self._controller.ahead(drafted, probability)

    @property
    def token_s(self) -> float:
        return self._controller.token_s

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        if isinstance(outcome, RoundEnded) and not outcome.supplied:
            steps = outcome.steps
            self.work += Work(outcome.accepted + 1, len(steps), sum(steps), 1, outcome.drafted)
            self.branched += outcome.drafted > outcome.depth
        self._controller.observe(outcome)


def work_of(replay: Replay, shape: Budget) -> Work:
    """What an answer takes with drafts of that shape."""
    counting = Counting(FixedShape(shape))
    hold(replay, counting, _ANY)
    return counting.work
