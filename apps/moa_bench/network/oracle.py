"""A drafter that is never wrong: the most that any drafter could gain."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafters.base import GREEDY, Budget, Float32
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree


class OracleDrafter:
    """Proposes what the target is known to write. Implements :class:`moa_runtime.drafters.base.Drafter`.

    It takes no time, and it is sent memory rows as any drafter is, but ignores them.

    Args:
        prompt_length: tokens before the answer.
        answer: what the target alone answers.
    """

    needs_rows = False
    manners = None

    def __init__(self, prompt_length: int, answer: Sequence[int]) -> None:
        self._prompt_length, self._answer = prompt_length, answer
        self.rows = 0

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """A chain of the answer's next tokens; fewer at its end."""
        written, most = len(prefix) - self._prompt_length, min(budget.nodes, budget.levels, budget.depth)
        tokens = self._answer[written : written + most]
        return DraftTree.chain(tokens, [0.0] * len(tokens))
