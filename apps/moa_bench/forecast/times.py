"""What steps take: the target's, and a drafter's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moa_runtime.errors import MoaError
from moa_server.scheduling.step_cost import StepCost


@dataclass(frozen=True)
class TimedStep:
    """A step of the target that was measured; its sizes as :class:`step_cost.StepCost` counts them.

    Attributes:
        tokens: that it was over.
        products: pairs of a token and a token that it attends to.
        contexts: tokens that its sequences hold.
    """

    tokens: int
    products: int
    contexts: int
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of the target, in the closed form that the verifier's scheduler learns
    (:class:`moa_server.scheduling.step_cost.StepCost`): here it is what happens, there what is expected.

    Attributes:
        pass_s: of any step.
        token_s, product_s, context_s: of each token, each pair of tokens and each token held.
    """

    pass_s: float
    token_s: float
    product_s: float
    context_s: float

    def seconds(self, tokens: int, products: int, contexts: int) -> float:
        """What a step of these sizes takes."""
        return self.pass_s + tokens * self.token_s + products * self.product_s + contexts * self.context_s

    def times(self, factor: float) -> StepTimes:
        """Of a machine that takes so many times as long."""
        return StepTimes(*(factor * each for each in (self.pass_s, self.token_s, self.product_s, self.context_s)))

    @classmethod
    def fit(cls, steps: Sequence[TimedStep]) -> StepTimes:
        """Least squares of relative errors; no part is negative.

        Raises:
            MoaError: too few different steps to tell the four parts apart.
        """
        sizes = np.array([[1.0, step.tokens, step.products, step.contexts] for step in steps])
        seconds = np.array([step.seconds for step in steps])
        if len(steps) < 4 or np.linalg.matrix_rank(sizes) < 4:
            raise MoaError(
                "steps of at least four kinds are needed: other numbers of tokens, of sequences, and of tokens held"
            )
        return cls(*least_squares(sizes / seconds[:, None]))

    def errors(self, steps: Iterable[TimedStep]) -> list[float]:
        """Of each step, how much longer it takes than was measured, as a share."""
        return [self.seconds(step.tokens, step.products, step.contexts) / step.seconds - 1 for step in steps]


def least_squares(rows: np.ndarray[Any, Any]) -> list[float]:
    """The ``w >= 0`` with the least ``|rows @ w - 1|``: the best of all choices of what is zero, which are few."""
    count = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    best, least = np.zeros(count), float("inf")
    for kept in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(1, count + 1)):
        some = list(kept)
        found, *_ = np.linalg.lstsq(rows[:, some] / scale[some], np.ones(len(rows)), rcond=None)
        residual = float(np.sum((rows[:, some] / scale[some] @ found - 1) ** 2))
        if (found >= 0).all() and residual < least:
            best, least = np.zeros(count), residual
            best[some] = found / scale[some]
    return [float(weight) for weight in best]


class KnownCost(StepCost):
    """What a scheduler expects that knows what steps take."""

    def __init__(self, times: StepTimes) -> None:
        super().__init__()
        self._weights = np.array([times.pass_s, times.token_s, times.product_s, times.context_s])

    def observe(self, tokens: int, products: int, contexts: int, seconds: float) -> None:
        """Nothing is to be learnt."""


@dataclass(frozen=True)
class DrafterTimes:
    """A drafter's step, and each node that it continues, seconds."""

    step_s: float
    query_s: float

    def seconds(self, steps: int, queries: int) -> float:
        """What so many steps take that continue so many nodes together."""
        return steps * self.step_s + queries * self.query_s


@dataclass(frozen=True)
class Times:
    """All that the simulation needs to know of machines.

    Attributes:
        target: steps of the target.
        server_drafter: of the verifier, which does one thing at a time: it drafts, or it runs a step.
        device: of each client.
        row_s: what a step takes longer for each memory row that it makes, for clients that can draft.
        verdict_s: what the verifier does besides for each verdict, while nothing else runs.
        most_sequences: in a step.
        cache_tokens: that the verifier's caches hold.
        learns: whether the verifier's scheduler learns what steps take, as that of ``moa-serve`` does; else it knows.
    """

    target: StepTimes
    server_drafter: DrafterTimes
    device: DrafterTimes
    row_s: float
    verdict_s: float
    most_sequences: int
    cache_tokens: int
    learns: bool = True

    def scaled(self, *, target: float = 1.0, server_drafter: float = 1.0, device: float = 1.0) -> Times:
        """The same with parts that take so many times as long."""
        return replace(
            self,
            target=self.target.times(target),
            row_s=target * self.row_s,
            server_drafter=_times(self.server_drafter, server_drafter),
            device=_times(self.device, device),
        )


def _times(drafter: DrafterTimes, factor: float) -> DrafterTimes:
    return DrafterTimes(factor * drafter.step_s, factor * drafter.query_s)
