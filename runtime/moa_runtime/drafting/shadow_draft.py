"""Drafts that are not sent: the server's own text shows how much of them it would have accepted."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.tree import DraftTree, depths, walk


class ShadowDraft:
    """Compare one draft at a time, made while the server streams, with the text that the server streams.

    Attributes:
        next: length of the shortest prefix for the next draft, so that each position is drafted once.
    """

    def __init__(self) -> None:
        self.next = self._start = 0
        self._tree: DraftTree | None = None
        self._seconds = 0.0

    @property
    def pending(self) -> bool:
        """Whether a draft is not compared yet."""
        return self._tree is not None

    def begin(self, start: int, tree: DraftTree, seconds: float) -> None:
        """Take a draft after the first ``start`` tokens, made in ``seconds``."""
        self._start, self._tree, self._seconds = start, tree, seconds
        self.next = start + 1

    def forget(self) -> None:
        """Drop the draft: the conversation's text has changed."""
        self._tree, self.next = None, 0

    def compare(self, committed: Sequence[int], round_s: float, token_s: float, sharing: int) -> RoundEnded | None:
        """Return the round that this draft would have made, or None if the text does not decide it yet.

        Args:
            committed: the conversation's tokens.
            round_s: seconds that a round without a draft would take.
            token_s: seconds that each drafted token adds.
            sharing: sessions that share the target.
        """
        tree = self._tree
        if tree is None:
            return None
        known = committed[self._start :]
        levels = [0, *depths(tree.parents)]
        path, _ = walk(tree.tokens, tree.parents, lambda node: known[levels[node]] if levels[node] < len(known) else -1)
        if len(path) == len(known):
            return None  # the next token decides
        self._tree = None
        drafted, accepted = len(tree.tokens), len(path)
        waited_s = round_s + token_s * drafted
        taken = self._seconds, waited_s, None
        return RoundEnded(0, drafted, tree.depth, accepted, tree.steps, *taken, sharing, tree.likeliest_scores())
