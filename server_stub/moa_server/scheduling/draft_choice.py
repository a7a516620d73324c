"""The choice of drafted tokens for a step, and the gain that drafts have brought.

The chosen tokens bring the most tokens a second, all sessions together: the rule of SSSD (arXiv 2411.05894, section 4),
with a measured cost instead of an assumed roofline. A step of n sessions with a set S of drafted tokens brings
``n + sum of q over S`` tokens in ``T(n + |S|)`` seconds; q is the probability that a token and all before it are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moa_server.scheduling.step_cost import Float64

#: Bins of path probabilities.
_BINS = 20
_MIDDLES = (np.arange(_BINS) + 0.5) / _BINS
#: Weight of a round in the means of a conversation, and of all of them.
_OWN, _ALL = 1 / 16, 1 / 128
#: Most tokens of a bin that a round counts: one draft that looks long says little of the next ones.
_MOST_ADDED = 8
#: Weight that a step has lost after one more of as many sessions.
_FORGETTING = 1 / 200
#: Weight of the first guess, in steps, and that guess: steps without drafts, with some, and with drafts of the
#: verifier's model bring this part of what is predicted. Rows for the model are made in advance, some for nothing.
_TRUST, _FIRST = 16.0, np.array([1.0, 0.95, 0.9])
#: Least weight of the newest step in the means of :class:`DraftSearch`, and steps before they count.
_NEWEST, _FEW = 1 / 64, 32
#: Steps of a cycle; steps at its beginning that search even if that does not pay; and every how many cycles as many
#: steps rest even if a search pays.
_CYCLE, _TRIALS, _RESTING = 64, 8, 8
#: Least and largest ratio of one step: a stall does not predict later steps.
_LEAST, _LARGEST = 0.5, 2.0


def choose_nodes(
    drafts: Sequence[Sequence[float]],
    seconds: Callable[[NDArray[np.int64]], Float64],
    *,
    most: int | None = None,
    least_gain: float = 1.0,
) -> list[list[int]]:
    """Choose the tokens of all drafts to verify in a step.

    Tokens are taken in the order of falling path probability, so those taken from a tree form a tree. All numbers of
    tokens are compared, because the time of a step rises in jumps; the number with the most tokens a second is chosen.

    Args:
        drafts: for each session the path probabilities of its drafted tokens, parents before children: the probability
            that a token and all before it are right.
        seconds: maps numbers of drafted tokens, int64 ``[n]``, to the seconds of such steps, float64 ``[n]``.
        most: largest number of drafted tokens.
        least_gain: least ratio of tokens a second with drafts to those without; below it no token is chosen (see
            :class:`DraftGain`).

    Returns:
        ascending indices of the chosen tokens of each draft.
    """
    entries = [
        (-probability, session, index)
        for session, draft in enumerate(drafts)
        for index, probability in enumerate(draft)
    ]
    entries.sort()  # of equal ones the parent comes first
    if most is not None:
        del entries[most:]
    chosen: list[list[int]] = [[] for _ in drafts]
    if not entries:
        return chosen
    tokens = len(drafts) + np.cumsum([0.0, *(-entry[0] for entry in entries)])
    rates = tokens / seconds(np.arange(len(entries) + 1))
    count = int(np.argmax(rates))
    if rates[count] < least_gain * rates[0]:
        return chosen
    for _, session, index in entries[:count]:
        chosen[session].append(index)
    for each in chosen:
        each.sort()
    return chosen


class DraftGain:
    """Measured tokens a second divided by predicted ones, for each kind of drafts and number of sessions.

    A prediction counts the target's pass, memory rows and the model's drafts. With many sessions it is too high: the
    set of drafted tokens that looks best is often one with too good estimates of probabilities and seconds (the
    winner's curse), and frames and copies of all sessions take time between the passes. So the predicted gain has to
    exceed the mean error of earlier predictions. With one session there is little to choose: any gain counts.
    """

    def __init__(self) -> None:
        # Sums and weights of ratios; by bits of the number of sessions, and kind of drafts.
        self._sums, self._weights = np.zeros((32, 3)), np.zeros((32, 3))

    def observe(self, sessions: int, predicted: float, measured: float, *, drafted: bool, modelled: bool) -> None:
        """Learn from a step.

        Args:
            predicted, measured: tokens a second.
            drafted: whether it had drafts.
            modelled: whether the verifier's model drafted for it.
        """
        row = sessions.bit_length()
        for part in (self._sums, self._weights):
            part[row] *= 1 - _FORGETTING
        kind = 2 if modelled else int(drafted)
        self._sums[row, kind] += min(_LARGEST, max(_LEAST, measured / predicted))
        self._weights[row, kind] += 1

    def least(self, sessions: int, *, modelled: bool = False) -> float:
        """Return the least ratio of predicted tokens a second with drafts, or with the model's, to those without."""
        if sessions <= 1:
            return 1.0
        row = sessions.bit_length()
        parts = (self._sums[row] + _TRUST * _FIRST) / (self._weights[row] + _TRUST)
        return float(parts[0] / parts[2 if modelled else 1])


class DraftSearch:
    """Whether several sessions look for drafts at all.

    Frames of drafts, copies, memory rows and their choice take processor time between the passes of all, also if no
    drafted token pays. Sessions stop looking when the search costs more than the drafts spare. In some steps they do
    the opposite, to notice a change. A needless rest costs more than a needless search, so it is tried less often.

    Attributes:
        steps: number of steps that were taken.
    """

    def __init__(self) -> None:
        # By bits of the number of sessions: mean seconds gained by a step without a search, and by one with a search,
        # and the numbers of such steps.
        self._gained_s, self._seen = np.zeros((32, 2)), np.zeros((32, 2))
        self.steps = 0

    def observe(self, sessions: int, gained_s: float, *, searched: bool) -> None:
        """Learn from a step.

        Args:
            gained_s: seconds that steps without drafts would have taken longer for its tokens, minus the processor
                seconds of the event loop since the last step.
            searched: whether its sessions looked for drafts.
        """
        place = sessions.bit_length(), int(searched)
        self._seen[place] += 1
        self._gained_s[place] += max(_NEWEST, 1 / self._seen[place]) * (gained_s - self._gained_s[place])

    def pays(self, sessions: int) -> bool:
        """Return whether sessions shall look for drafts in the coming step. A single one always does."""
        rested, searched = self._seen[sessions.bit_length()]
        cycle, step = divmod(self.steps, _CYCLE)
        if sessions <= 1 or searched < _FEW or step < _TRIALS:
            return True
        if rested < _TRIALS or (cycle % _RESTING == 0 and step < 2 * _TRIALS):
            return False
        rested_s, searched_s = self._gained_s[sessions.bit_length()]
        return bool(searched_s >= rested_s)


class DraftWorth:
    """The tokens that a client's drafts, and so its memory rows, add to the verifier's own: their mean number a round,
    by path probability.

    Args:
        all_rounds: the gain over all conversations, which a new conversation begins with and updates; None for that
            gain itself, which begins with one token of probability 0.7 a round.
    """

    def __init__(self, all_rounds: DraftWorth | None = None) -> None:
        self._all = all_rounds
        if all_rounds is None:
            self._added = np.where(_MIDDLES.searchsorted(0.7) == np.arange(_BINS), 1.0, 0.0)
        else:
            self._added = all_rounds._added.copy()

    def add(self, drafted: Sequence[float], own: Sequence[float]) -> None:
        """Note a round: path probabilities of the better draft, and of the verifier's own."""
        added = np.bincount(_bins(drafted), minlength=_BINS) - np.bincount(_bins(own), minlength=_BINS)
        added = np.clip(added, -_MOST_ADDED, _MOST_ADDED)
        self._learn(added, _OWN)
        if self._all is not None:
            self._all._learn(added, _ALL)

    def tokens(self, price: float) -> float:
        """Return the number of tokens that the drafts add to a round, minus the price of the tokens verified for them.

        Args:
            price: price of a drafted token, in tokens.
        """
        return float(self._added @ np.maximum(_MIDDLES - price, 0.0))

    def _learn(self, added: np.ndarray, weight: float) -> None:
        self._added += weight * (added - self._added)


def _bins(paths: Sequence[float]) -> np.ndarray:
    return np.minimum((_BINS * np.asarray(paths)).astype(np.int64), _BINS - 1)
