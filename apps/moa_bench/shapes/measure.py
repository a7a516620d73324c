"""Scenarios, and what drafts at their price bring in them against the best fixed shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moa_bench.pace import Pace
from moa_bench.result import rounded
from moa_bench.shapes.draw import log_uniform, some_answers
from moa_bench.shapes.fixed import SHAPES, Counting, Work, kind_of, name_of, work_of
from moa_bench.shapes.replay import Replay, hold
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.draft_controllers import Controller

#: Of a scenario's own.
TOKENS = 400


@dataclass(frozen=True)
class Scenario:
    """A device, a link and a target, and the answers of a conversation, by number."""

    pace: Pace
    answers: tuple[int, ...]


def scenarios(count: int, seed: int, lengths: Sequence[int]) -> Iterator[Scenario]:
    """So many, drawn at random: a device's step takes 1 to 40 ms and each node that it continues 0.03 to 0.5 of that, a
    pass of the target 5 to 300 ms and each token 0.0002 to 0.15 of that, a round trip up to 400 ms. All are
    log-uniform, the round trip from 1 ms on, less that millisecond.

    Args:
        lengths: tokens of each answer there is; a scenario takes some until they have :data:`TOKENS`.
    """
    rng = random.Random(seed)
    for _ in range(count):
        step_s, pass_s = log_uniform(rng, 0.001, 0.04), log_uniform(rng, 0.005, 0.3)
        query_s, token_s = step_s * log_uniform(rng, 0.03, 0.5), pass_s * log_uniform(rng, 0.0002, 0.15)
        pace = Pace(step_s, query_s, pass_s, token_s, log_uniform(rng, 0.001, 0.401) - 0.001)
        yield Scenario(pace, some_answers(rng, lengths, TOKENS))


@dataclass(frozen=True)
class Outcome:
    """What became of a scenario.

    Attributes:
        best: the fixed shape that brings most tokens a second in it.
        best_rate, rate: tokens a second of that, and of the controller.
        work: what the controller's rounds took.
        branched: share of its drafts that had branches.
    """

    scenario: Scenario
    best: Budget
    best_rate: float
    rate: float
    work: Work
    branched: float

    @property
    def share(self) -> float:
        """Of the tokens a second that the best fixed shape brings."""
        return self.rate / self.best_rate

    def as_dict(self) -> dict[str, Any]:
        """Plain figures for JSON: times in milliseconds, and means over the controller's rounds."""
        pace, work = self.scenario.pace, self.work
        return {
            "pace_ms": pace.in_ms(),
            "answers": self.scenario.answers,
            "best": name_of(self.best),
            "best_kind": kind_of(self.best),
            "best_rate": rounded(self.best_rate),
            "rate": rounded(self.rate),
            "share": rounded(self.share),
            "tau": rounded(work.tokens / work.passes),
            "steps": rounded(work.steps / work.passes),
            "queries": rounded(work.queries / work.passes),
            "nodes": rounded(work.nodes / work.passes),
            "branched": rounded(self.branched),
        }


class Field:
    """Recorded answers, and what every fixed shape takes for each.

    Args:
        on_answer: called for each answer.
    """

    def __init__(self, replays: Sequence[Replay], on_answer: Callable[[], None] = lambda: None) -> None:
        self.replays = replays
        self._works: dict[Budget, list[Work]] = {shape: [] for shape in SHAPES}
        for replay in replays:
            for shape, works in self._works.items():
                works.append(work_of(replay, shape))
            on_answer()

    def run(self, scenario: Scenario, controller: Controller) -> Outcome:
        """The controller against all fixed shapes."""
        rates = {
            shape: sum((works[at] for at in scenario.answers), Work()).rate(scenario.pace)
            for shape, works in self._works.items()
        }
        best = max(rates, key=rates.__getitem__)
        counting = Counting(controller)
        seconds = sum(hold(self.replays[at], counting, scenario.pace) for at in scenario.answers)
        work = counting.work
        return Outcome(scenario, best, rates[best], work.tokens / seconds, work, counting.branched / work.passes)
