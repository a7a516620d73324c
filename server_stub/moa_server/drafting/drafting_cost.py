"""Duration of drafts by the verifier's model, and the drafts that pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moa_server.scheduling.step_cost import Float64, StepSeconds, showing_price

#: Most levels that the model drafts.
LEVELS = 8
#: Steps over which the memory rows that a conversation lacks are spread: its answer may end soon.
SPREAD = 64
#: Weight that a draft has lost after one more.
_FORGETTING = 1 / 50


class DraftingCost:
    """Seconds of drafting ``levels`` tokens for each of several conversations at once: least squares of ``a * levels +
    b * levels * conversations`` over the last drafts."""

    def __init__(self) -> None:
        self._weights = np.array([1e-3, 5e-4])  # a guess until the first draft
        self._square, self._cross = np.zeros((2, 2)), np.zeros(2)

    def observe(self, levels: int, conversations: int, seconds: float) -> None:
        """Learn from one draft."""
        sizes = np.array([levels, levels * conversations]) / seconds  # relative errors
        self._square = self._square * (1 - _FORGETTING) + np.outer(sizes, sizes)
        self._cross = self._cross * (1 - _FORGETTING) + sizes
        # Drafts of one kind do not tell the two apart: towards equal shares for one conversation.
        scale = self._cross.sum() / self._square.sum()
        ridge = 0.02 * np.trace(self._square) * np.eye(2)
        self._weights = np.maximum(np.linalg.solve(self._square + ridge, self._cross + ridge @ [scale, scale]), 0.0)

    def seconds(self, levels: NDArray[np.int64] | int, conversations: NDArray[np.int64] | int) -> Float64:
        """Predict the seconds of a draft."""
        each, more = self._weights
        return np.asarray(levels * (each + more * conversations), np.float64)


@dataclass(frozen=True)
class ModelDrafts:
    """Drafts of the model before a step.

    Attributes:
        chosen: indices of the conversations; none if drafting does not pay.
        levels: of each draft.
        rate: tokens a second of the step without them.
        price: tokens that the step would bring in the time of one more drafted token, in the mean over a few tokens,
            because engines round up.
    """

    chosen: Sequence[int]
    levels: int
    rate: float
    price: float


def drafts_that_pay(
    paths: Sequence[Float64],
    known: Sequence[Sequence[float]],
    cost: DraftingCost,
    seconds: StepSeconds,
    row_s: float = 0.0,
    least_gain: float = 1.0,
    lacking: Sequence[int] | None = None,
) -> ModelDrafts:
    """Choose the conversations for which the model drafts before a step, and the levels, by largest ``(tokens expected
    of the step) / (its seconds + those of the draft and of a memory row for each token that the draft's conversations
    get)``. Rows that a conversation lacks are spread over some steps.

    Args:
        paths: of each conversation of the step, probabilities of the path to each level in drafts like the next one,
            ``[n, LEVELS]``; empty if the model cannot draft for it.
        known: of each, probabilities of the path to each token of the draft that it has without the model.
        seconds: of the step.
        row_s: seconds that a memory row takes.
        least_gain: as of :func:`~moa_server.scheduling.draft_choice.choose_nodes`.
        lacking: number of memory rows that each conversation lacks, besides that of its last token; None for none.
    """
    likeliest = np.array(sorted((one for each in known for one in each), reverse=True))
    tokens = len(paths) + np.concatenate(([0.0], np.cumsum(likeliest)))
    drafted = int(np.argmax(tokens / seconds(np.arange(len(tokens)))))
    many = showing_price(len(paths))
    now, more, most_s = seconds(np.array([drafted, drafted + len(paths), drafted + many])).tolist()
    rate = float(tokens[drafted]) / now
    price = rate * (more - now) / len(paths)
    usual = rate * (most_s - now) / many
    nothing, able = ModelDrafts((), 0, rate, usual), [index for index, each in enumerate(paths) if len(each)]
    if not able:
        return nothing
    every = np.stack([paths[index] for index in able])
    worth = every >= price  # a token that is not worth its row stays out of the step
    least = likeliest[drafted - 1] if drafted else math.inf
    kept = [[one for one in known[index] if one >= least] for index in able]
    had = np.array([[sum(each), len(each)] for each in kept])
    right = (every * worth).mean(1).cumsum(1)  # [able, LEVELS]
    gained, rows = right - had[:, :1], worth.mean(1).cumsum(1) - had[:, 1:]
    asked = 1 + right  # memory rows
    if lacking is not None:
        asked = asked + np.array([[lacking[index] / SPREAD] for index in able])
    if len(able) > 1:
        order = np.argsort(price * rows - gained + rate * row_s * asked, axis=0)
        asked, gained, rows = (np.take_along_axis(part, order, 0).cumsum(0) for part in (asked, gained, rows))
    else:
        order = np.zeros((1, LEVELS), np.int64)
    counts, levels = np.arange(1, len(able) + 1)[:, None], np.arange(1, LEVELS + 1)[None]
    steps = seconds(np.maximum(0, np.rint(drafted + rows)).astype(np.int64).ravel()).reshape(rows.shape)
    rates = (tokens[drafted] + gained) / (steps + cost.seconds(levels, counts) + row_s * asked)
    most, level = np.unravel_index(np.argmax(rates), rates.shape)
    if rates[most, level] < least_gain * rate:
        return nothing
    return ModelDrafts([able[at] for at in order[: most + 1, level]], int(level) + 1, rate, usual)
