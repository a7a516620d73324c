"""What a draft may be and cost: fixed, or as it pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.events import Pushed, RoundEnded


class Controller(Protocol):
    """Decides the shape of each draft from what earlier rounds showed."""

    def budget(self) -> Budget:
        """Of the next draft."""

    def ahead(self, drafted: int, probability: float) -> bool:
        """Whether to draft one more token while a verdict is on its way (optimistic drafting).

        Args:
            drafted: tokens behind the draft that is on its way, which were drafted since.
            probability: the drafter's own, that all of it and these are right.
        """

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        """A round has ended, or would have with a draft that was not sent; or the server went on by itself."""

    @property
    def token_s(self) -> float:
        """Seconds that the target's pass takes longer for each drafted token, as far as is known."""


@dataclass(frozen=True)
class FixedShape:
    """Always the same shape.

    ``lookahead``, tokens drafted while a verdict is on its way, pays only where whole drafts are often accepted: what
    is written ahead is kept only when the draft before it, and the bonus token after that, were right.
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
