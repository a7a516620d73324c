"""Controllers: the shape of the next draft, fixed or learned from earlier rounds.

Thompson sampling follows EESD (Liu et al., ACL Findings 2024, arXiv 2406.03853).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Protocol

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.options import DraftLength

_MOST = 16  # tokens of a draft by Thompson sampling
_BINS = 10
#: Weight of the drafter's own probabilities in each bin, in drafts.
_TRUST = 4.0


class Controller(Protocol):
    """Decide the shape of each draft from the outcomes of earlier rounds."""

    def budget(self) -> Budget:
        """Return the budget of the next draft."""

    def ahead(self, drafted: int, probability: float) -> bool:
        """Return whether to draft one more token while a verdict is in flight (optimistic drafting).

        Args:
            drafted: number of tokens drafted since that draft was sent.
            probability: the drafter's estimate that the draft in flight and these tokens are all accepted.
        """

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        """Learn from a round, from the hypothetical round of a draft that was not awaited, or from a pushed verdict."""

    @property
    def token_s(self) -> float:
        """Seconds that each drafted token adds to the target's pass, as far as is known."""


@dataclass(frozen=True)
class FixedShape:
    """Always the same shape.

    ``lookahead`` is the number of tokens drafted while a verdict is in flight. It pays only if whole drafts are often
    accepted, because these tokens stay only if the draft and the bonus token before them were right.
    """

    shape: Budget = Budget.chain(6)  # noqa: RUF009 (frozen)
    lookahead: int = 0

    def budget(self) -> Budget:
        return self.shape

    def ahead(self, drafted: int, probability: float) -> bool:
        return drafted < self.lookahead

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        return

    @property
    def token_s(self) -> float:
        return 0.0


class _Thompson(ABC):
    """Draw the length of a chain anew after every verdict. Implements :class:`Controller`.

    Times and costs play no part, and nothing is drafted while a verdict is in flight.

    Args:
        seed: seed of the draws; seed and verdicts determine every length.
    """

    token_s = 0.0

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._budget: Budget | None = None  # of the next draft, once it is drawn

    def budget(self) -> Budget:
        """Return the budget that was drawn after the last verdict."""
        if self._budget is None:
            self._budget = self._draw()
        return self._budget

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        if isinstance(outcome, RoundEnded) and outcome.depth:
            self._learn(outcome)
            self._budget = None

    @abstractmethod
    def _draw(self) -> Budget:
        """Draw the shape of the next draft."""

    @abstractmethod
    def _learn(self, outcome: RoundEnded) -> None:
        """Learn from a verdict on at least one token."""


class BetaThompson(_Thompson):
    """Beta-TS: after each token, draw an acceptance rate from a beta distribution; continue with that probability.

    Only tokens that the target judged count: the accepted ones and the first refused one. Copies after the drawn length
    do not count.

    Attributes:
        right, wrong: parameters of the beta distribution, at first (1, 1), which is uniform.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.right = self.wrong = 1.0

    def _draw(self) -> Budget:
        length = 1
        while length < _MOST and self._random.random() < self._random.betavariate(self.right, self.wrong):
            length += 1
        return Budget.chain(length)

    def _learn(self, outcome: RoundEnded) -> None:
        levels = min(outcome.depth, self.budget().levels)
        right = min(outcome.accepted, levels)
        self.right += right
        self.wrong += right < levels


class CalibratedThompson(_Thompson):
    """The calibrated form: the drafter's own probabilities, corrected by verdicts, determine the length.

    After a token, drafting continues with the probability that the whole draft so far is right. That probability has a
    beta distribution for each tenth of the drafter's own estimate: it begins around the estimate, and verdicts move it.
    One number is drawn for the whole draft; drafting continues while each probability exceeds it, which gives each
    length the same probability. A :class:`Budget` can hold this threshold.

    This is the paper's idea, a model's prediction corrected by Thompson sampling, without its normal distributions.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        claims = [(at + 0.5) / _BINS for at in range(_BINS)]
        self._bins = [[_TRUST * claim, _TRUST * (1 - claim)] for claim in claims]  # drafts right and wrong

    def _draw(self) -> Budget:
        least, threshold = self._random.random(), 1.0
        for at in reversed(range(_BINS)):
            if self._random.betavariate(*self._bins[at]) < least:
                break
            threshold = at / _BINS
        return Budget(Budget.chain(0).nodes, _MOST, prices=Prices(step=threshold))

    def _learn(self, outcome: RoundEnded) -> None:
        for at, score in enumerate(outcome.scores[:_MOST]):
            claim = min(int(_BINS * math.exp(score)), _BINS - 1)
            self._bins[claim][at >= outcome.accepted] += 1


def controller_for(length: DraftLength) -> Controller:
    """Return a new controller for one conversation: chains of ``length`` tokens, or the adaptive kind it names."""
    if isinstance(length, int):
        return FixedShape(Budget.chain(length))
    adaptive: dict[str, type[CostModel | BetaThompson | CalibratedThompson]] = {
        "auto": CostModel,
        "thompson": BetaThompson,
        "thompson-calibrated": CalibratedThompson,
    }
    return adaptive[length]()
