"""Answers that the device wrote without the target, as turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling


@dataclass(frozen=True)
class Unconfirmed:
    """A turn whose text, or its end, the target has not confirmed: it is to be checked.

    Attributes:
        turn: index of the answer among the conversation's turns.
        sampling: what the question was asked with: the target's choices depend on it.
        most: tokens that the answer may have; 0 for no limit. Of an answer that the user stopped, as many as it has.
    """

    turn: int
    sampling: Sampling
    most: int


def checked_marks(marks: Sequence[Unconfirmed], turns: Sequence[dict[str, str]]) -> list[Unconfirmed]:
    """The marks of these turns, in order.

    Raises:
        MoaError: one that is not of an answer to a question.
    """
    for mark in marks:
        turn = mark.turn
        answers = 0 < turn < len(turns) and [turns[turn - 1]["role"], turns[turn]["role"]] == ["user", "assistant"]
        if not answers:
            raise MoaError(f"an unconfirmed turn must be an answer behind its question, and turn {turn} is not")
    return sorted({mark.turn: mark for mark in marks}.values(), key=lambda mark: mark.turn)
