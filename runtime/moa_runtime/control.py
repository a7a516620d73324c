"""How long to draft before asking the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Controller(Protocol):
    """Decides the draft length of each round from what earlier rounds showed."""

    def draft_length(self) -> int:
        """Tokens to draft for the next round."""

    def ahead(self) -> int:
        """Tokens to draft on while a verdict is on its way (optimistic drafting)."""

    def observe(self, drafted: int, accepted: int, round_trip_s: float) -> None:
        """One round's outcome: tokens sent, tokens accepted, seconds from sending to the verdict."""


@dataclass(frozen=True)
class FixedLength:
    """Always the same draft length.

    ``lookahead`` pays only where whole drafts are often accepted: what is written ahead is kept only
    when the draft before it, and the bonus token after that, were right.
    """

    length: int = 6
    lookahead: int = 0

    def draft_length(self) -> int:
        return self.length

    def ahead(self) -> int:
        return self.lookahead

    def observe(self, drafted: int, accepted: int, round_trip_s: float) -> None:
        return
