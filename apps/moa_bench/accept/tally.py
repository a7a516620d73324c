"""Counting rounds: tau, the histogram of accepted lengths, and accuracy by depth."""

from __future__ import annotations

from typing import Any

from moa_bench.conversation import Round
from moa_bench.result import rounded


class Tally:
    """What the rounds of one task, or of several, came to.

    *tau* is the mean number of tokens committed per round: ``tokens / rounds`` over all rounds of all
    questions, so a long answer weighs more than a short one. A round is one Draft and its verdict. The
    question's own verdict, which brings the first token of every answer, is neither a round nor are
    its tokens counted. An answer's last round may commit fewer tokens than the drafter had right, because
    the answer ends there; it counts as it is.

    *Accuracy at depth k* is conditional acceptance: of the rounds whose first k - 1 drafted tokens were
    right and whose k-th was judged, the share in which that one was right too. A token is not judged where
    the draft was shorter, or where the answer ended before it. Depths at which nothing was judged are None. Of a tree,
    depth k is right if one of its tokens there is.

    The *histogram* counts rounds by accepted drafted tokens, ``histogram[0]`` those with none.

    Example: drafts of 3 tokens; one round accepts 2 and commits 3, the next accepts 0 and commits 1. Then
    tau is 2, the histogram ``[1, 0, 1, 0]``, and the accuracy by depth ``[0.5, 1.0, 0.0]``.

    Args:
        draft_length: tokens of a draft, or levels of a tree, that are drafted; both lists go at least so far, and
            farther where more was sent that needed no drafting, and was accepted.
    """

    def __init__(self, draft_length: int) -> None:
        self.questions = 0
        self.rounds = 0
        self.tokens = 0
        self.histogram = [0] * (draft_length + 1)
        self._judged = [0] * draft_length
        self._right = [0] * draft_length
        self._nodes = self._levels = self._branched = self._steps = 0
        self._seconds = 0.0

    def add(self, outcome: Round, *, timed: bool = False) -> None:
        """Count a round; ``timed``: also its time."""
        self.rounds += 1
        self._steps += outcome.steps
        self._seconds += outcome.seconds if timed else 0.0
        self.tokens += outcome.committed
        self._nodes += outcome.drafted
        self._levels += outcome.depth
        self._branched += outcome.drafted > outcome.depth
        self.histogram += [0] * (outcome.accepted + 1 - len(self.histogram))
        self.histogram[outcome.accepted] += 1
        # Without a token of the target's own the answer ended with the last accepted one.
        ended = outcome.committed == outcome.accepted
        judged = outcome.accepted if ended else min(outcome.accepted + 1, outcome.depth)
        longer = [0] * (judged - len(self._judged))
        self._judged, self._right = self._judged + longer, self._right + longer
        for depth in range(judged):
            self._judged[depth] += 1
            self._right[depth] += depth < outcome.accepted

    @property
    def tau(self) -> float | None:
        """Tokens per round; None without rounds."""
        return self._mean(self.tokens)

    @property
    def accuracy_by_depth(self) -> list[float | None]:
        """Depth 1 first."""
        return [right / judged if judged else None for right, judged in zip(self._right, self._judged, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Plain figures for JSON. ``nodes`` and ``levels`` are tokens of a draft and of its longest path on average,
        ``steps`` those of the model for it, ``branched`` is the share of drafts with branches. ``ms_per_token`` is the
        time of all rounds by their tokens, None where rounds were not timed."""
        return {
            "tau": rounded(self.tau),
            "rounds": self.rounds,
            "tokens": self.tokens,
            "questions": self.questions,
            "nodes": rounded(self._mean(self._nodes)),
            "levels": rounded(self._mean(self._levels)),
            "steps": rounded(self._mean(self._steps)),
            "branched": rounded(self._mean(self._branched)),
            "ms_per_token": rounded(1000 * self._seconds / self.tokens, 2) if self._seconds else None,
            "accuracy_by_depth": [rounded(share) for share in self.accuracy_by_depth],
            "accepted_length_histogram": self.histogram,
        }

    def _mean(self, total: int) -> float | None:
        return total / self.rounds if self.rounds else None
