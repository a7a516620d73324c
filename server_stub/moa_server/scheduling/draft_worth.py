"""What the drafts of a client are worth: whether its memory rows pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bins of path probabilities.
_BINS = 20
_MIDDLES = (np.arange(_BINS) + 0.5) / _BINS
#: Weight of a round in the means of a conversation, and of all of them.
_OWN, _ALL = 1 / 16, 1 / 128


class DraftWorth:
    """What a client's drafts add to the verifier's own, for any price of a drafted token: the mean over rounds of how
    many tokens of each path probability it adds.

    Args:
        all_rounds: of all conversations, which teaches a new one and learns from it; None for that one itself, which
            begins with a token a round that is right with 0.7.
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
        self._learn(added, _OWN)
        if self._all is not None:
            self._all._learn(added, _ALL)

    def tokens(self, price: float) -> float:
        """Return the tokens a round that it adds, less the price of those verified for them.

        Args:
            price: of a drafted token, in tokens.
        """
        return float(self._added @ np.maximum(_MIDDLES - price, 0.0))

    def _learn(self, added: np.ndarray, weight: float) -> None:
        self._added += weight * (added - self._added)


def _bins(paths: Sequence[float]) -> np.ndarray:
    return np.minimum((_BINS * np.asarray(paths)).astype(np.int64), _BINS - 1)
