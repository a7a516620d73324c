"""Controllers: the shape of the next draft, fixed or learned from earlier rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.cost_model import CostModel
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.drafting.thompson import BetaThompson, CalibratedThompson
from moa_runtime.options import DraftLength


class Controller(Protocol):
    """Decide the shape of each draft from the outcomes of earlier rounds."""

    def budget(self) -> Budget:
        """Return the budget of the next draft."""

    def ahead(self, drafted: int, probability: float) -> bool:
        """Return whether to draft one more token while a verdict is in flight (optimistic drafting).

        Args:
            drafted: tokens drafted since that draft was sent.
            probability: the drafter's own, that the draft in flight and these tokens are all accepted.
        """

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        """Learn from a round, from a shadow draft's hypothetical round, or from a pushed verdict."""

    @property
    def token_s(self) -> float:
        """Seconds that each drafted token adds to the target's pass, as far as is known."""


@dataclass(frozen=True)
class FixedShape:
    """Always the same shape.

    ``lookahead`` is the number of tokens drafted while a verdict is in flight. It pays only if whole drafts are often
    accepted: they are kept only when the draft before them, and the bonus token after it, were right.
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
