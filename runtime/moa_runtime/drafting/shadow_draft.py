"""Drafts that are not sent: what they would have brought shows in what the server writes by itself."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.tree import DraftTree, depths, walk


class Trial:
    """One draft at a time, made while the server goes on by itself, and compared with what it writes.

    Attributes:
        next: tokens behind which the next is to be made at least: each position is tried once.
    """

    def __init__(self) -> None:
        self.next = self._start = 0
        self._tree: DraftTree | None = None
        self._seconds = 0.0

    @property
    def runs(self) -> bool:
        """Whether a draft is still to be compared."""
        return self._tree is not None

    def begin(self, start: int, tree: DraftTree, seconds: float) -> None:
        """A draft behind the first ``start`` tokens was made in so many seconds."""
        self._start, self._tree, self._seconds = start, tree, seconds
        self.next = start + 1

    def forget(self) -> None:
        """The text is another one."""
        self._tree, self.next = None, 0

    def compare(self, committed: Sequence[int], round_s: float, token_s: float, sharing: int) -> RoundEnded | None:
        """Once it is known: the round that this draft would have had; None before.

        Args:
            committed: the conversation's tokens.
            round_s: seconds that a round without a draft would take.
            token_s: those that each drafted token adds.
            sharing: conversations that share the target.
        """
        tree = self._tree
        if tree is None:
            return None
        known = committed[self._start :]
        levels = [0, *depths(tree.parents)]
        path, _ = walk(tree.tokens, tree.parents, lambda node: known[levels[node]] if levels[node] < len(known) else -1)
        if len(path) == len(known):
            return None  # what comes next decides
        self._tree = None
        drafted, accepted = len(tree.tokens), len(path)
        waited_s = round_s + token_s * drafted
        taken = self._seconds, waited_s, None
        return RoundEnded(0, drafted, tree.depth, accepted, tree.steps, *taken, sharing, tree.likeliest_scores())
