"""The least predicted gain for which a step has drafts, learnt from what steps brought in fact."""

from __future__ import annotations

import numpy as np

#: Weight that a step has lost after one more of as many sessions.
_FORGETTING = 1 / 200
#: Weight of the first guess, in steps, and that guess: drafts among others bring this part of what is predicted.
_TRUST, _FIRST = 16.0, 0.95
#: Least and largest ratio of one step: a stall does not predict later steps.
_LEAST, _LARGEST = 0.5, 2.0


class DraftGain:
    """Tokens a second of steps by those predicted, of steps with drafts and of plain ones, by number of sessions.

    A prediction counts the target's pass alone. In a crowd it is better than what comes true: the best of many sets of
    drafted tokens is the one whose probabilities and seconds were estimated too well (the winner's curse), and frames
    and copies of all sessions, and memory rows, take their time between the passes. So drafts have to be predicted
    better than plain steps by what they have been worse so far. Alone there is little to choose, and nothing between
    the passes: any gain counts.
    """

    def __init__(self) -> None:
        # Sums and weights of ratios; by bits of the number of sessions, plain and with drafts.
        self._sums, self._weights = np.zeros((32, 2)), np.zeros((32, 2))

    def observe(self, sessions: int, drafted: bool, predicted: float, measured: float) -> None:
        """Learn from a step.

        Args:
            drafted: whether it had drafts.
            predicted, measured: tokens a second.
        """
        row = sessions.bit_length()
        for part in (self._sums, self._weights):
            part[row] *= 1 - _FORGETTING
        self._sums[row, int(drafted)] += min(_LARGEST, max(_LEAST, measured / predicted))
        self._weights[row, int(drafted)] += 1

    def least(self, sessions: int) -> float:
        """Return the least gain: predicted tokens a second with drafts by those without."""
        if sessions <= 1:
            return 1.0
        row = sessions.bit_length()
        first = np.array([1.0, _FIRST])
        plain, drafts = (self._sums[row] + _TRUST * first) / (self._weights[row] + _TRUST)
        return float(plain / drafts)
