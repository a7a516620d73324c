"""Draft lengths by Thompson sampling: the controllers of EESD (Liu et al., ACL Findings 2024, arXiv 2406.03853)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from random import Random

from moa_runtime.drafters.base import Budget, Prices
from moa_runtime.drafting.events import Pushed, RoundEnded

_MOST = 16
_BINS = 10
#: Drafts that the drafter's own account counts as, in each bin, beside those that verdicts tell of.
_TRUST = 4.0


class _Thompson(ABC):
    """Chains whose length is drawn anew after every verdict. Implements :class:`draft_controllers.Controller`.

    Neither times nor prices are looked at, and nothing is drafted while a verdict is on its way.

    Args:
        seed: of the draws; verdicts and seed decide every length.
        most: tokens that the model drafts at most.

    Raises:
        ValueError: ``most`` is less than 1.
    """

    token_s = 0.0

    def __init__(self, seed: int = 0, *, most: int = _MOST) -> None:
        if most < 1:
            raise ValueError(f"a draft must be allowed at least 1 token, not {most}")
        self._random, self._most = Random(seed), most
        self._budget: Budget | None = None  # of the next draft, once it is drawn

    def budget(self) -> Budget:
        """The same until a verdict is observed."""
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
        """A draft's shape, by what is known."""

    @abstractmethod
    def _learn(self, outcome: RoundEnded) -> None:
        """A verdict on at least one token."""


class BetaThompson(_Thompson):
    """Beta-TS: how often a drafted token is right has a beta distribution; behind each token a probability is drawn
    from it, and with that probability one more is drafted.

    Only tokens that the target came to are judged: those it took, and the first that it refused. Copies behind the
    drawn length teach nothing of the model.

    Attributes:
        right, wrong: the parameters of the distribution, which begins uniform.
    """

    def __init__(self, seed: int = 0, *, most: int = _MOST) -> None:
        super().__init__(seed, most=most)
        self.right = self.wrong = 1.0

    def _draw(self) -> Budget:
        length = 1
        while length < self._most and self._random.random() < self._random.betavariate(self.right, self.wrong):
            length += 1
        return Budget.chain(length)

    def _learn(self, outcome: RoundEnded) -> None:
        levels = min(outcome.depth, self.budget().levels)
        right = min(outcome.accepted, levels)
        self.right += right
        self.wrong += right < levels


class CalibratedThompson(_Thompson):
    """The calibrated form: the drafter's own probabilities, corrected by what verdicts say of them, decide.

    Drafting goes on behind a token with the chance that all of the draft is right. That chance has a beta distribution
    for each tenth of what the drafter claims it to be; it begins around the claim, and verdicts move it. To go on with
    the chance of each token, token by token, or while the chance of all of them is above one number drawn for the whole
    draft gives every length the same probability; so a draft is one threshold, which a :class:`Budget` can say.

    It follows the paper's idea, a prediction of the model corrected by Thompson sampling, and not its formulas, in
    which both are normal distributions.
    """

    def __init__(self, seed: int = 0, *, most: int = _MOST) -> None:
        super().__init__(seed, most=most)
        claims = [(at + 0.5) / _BINS for at in range(_BINS)]
        self._bins = [[_TRUST * claim, _TRUST * (1 - claim)] for claim in claims]  # drafts right and wrong

    @property
    def chances(self) -> list[float]:
        """The mean chance that a draft is right, by tenths of what the drafter claims, the lowest first."""
        return [right / (right + wrong) for right, wrong in self._bins]

    def _draw(self) -> Budget:
        least, threshold = self._random.random(), 1.0
        for at in reversed(range(_BINS)):
            if self._random.betavariate(*self._bins[at]) < least:
                break
            threshold = at / _BINS
        return Budget(Budget.chain(0).nodes, self._most, prices=Prices(step=threshold))

    def _learn(self, outcome: RoundEnded) -> None:
        for at, score in enumerate(outcome.scores[: self._most]):
            claim = min(int(_BINS * math.exp(score)), _BINS - 1)
            self._bins[claim][at >= outcome.accepted] += 1
