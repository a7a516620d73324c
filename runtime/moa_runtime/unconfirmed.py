"""Answers that the device wrote without the target, as turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.snapshot import sampling_from_json
from moa_runtime.wishes import check_wishes


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


def mark_from_json(data: Any) -> Unconfirmed:
    """What ``dataclasses.asdict`` made of one.

    Raises:
        MoaError: it is broken.
    """
    turn, most = (data.get("turn"), data.get("most")) if isinstance(data, dict) else (None, None)
    if not _is_count(turn) or not _is_count(most):
        raise MoaError(f"an unconfirmed turn must have a turn and a most, whole numbers, not {data!r}")
    return Unconfirmed(turn, sampling_from_json(data.get("sampling")), most)


def checked_marks(marks: Sequence[Unconfirmed], turns: Sequence[dict[str, str]]) -> list[Unconfirmed]:
    """The marks of these turns, in order.

    Raises:
        MoaError: one that is not of an answer to a question, or that no verifier could check.
    """
    for mark in marks:
        turn = mark.turn
        answers = 0 < turn < len(turns) and [turns[turn - 1]["role"], turns[turn]["role"]] == ["user", "assistant"]
        if not answers:
            raise MoaError(f"an unconfirmed turn must be an answer behind its question, and turn {turn} is not")
        check_wishes(mark.most, mark.sampling)
    return sorted({mark.turn: mark for mark in marks}.values(), key=lambda mark: mark.turn)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
