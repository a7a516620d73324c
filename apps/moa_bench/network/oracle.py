"""A drafter that is never wrong: the most that any drafter could gain."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafters.base import DraftToken, Float32


class OracleDrafter:
    """Proposes what the target is known to write. Implements :class:`moa_runtime.drafters.base.Drafter`.

    It takes no time, and it is sent memory rows as any drafter is, but ignores them.

    Args:
        prompt_length: tokens before the answer.
        answer: what the target alone answers.
    """

    def __init__(self, prompt_length: int, answer: Sequence[int]) -> None:
        self._prompt_length, self._answer = prompt_length, answer
        self.rows = 0

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self.rows = start + len(keys)

    def truncate_rows(self, length: int) -> None:
        self.rows = min(self.rows, length)

    def draft(self, prefix: Sequence[int], count: int) -> list[DraftToken]:
        """The answer's next tokens; fewer at its end."""
        written = len(prefix) - self._prompt_length
        return [DraftToken(token, 0.0) for token in self._answer[written : written + count]]

    def lengthen(self, prefix: Sequence[int], logprob: float) -> list[DraftToken]:
        """Nothing, so that the draft is as long as was asked for."""
        return []
