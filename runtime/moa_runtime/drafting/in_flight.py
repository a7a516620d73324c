"""The draft on its way, and the one that is being made, in figures."""

from __future__ import annotations

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.events import Decided
from moa_runtime.session.tree import DraftTree


class Rounds:
    """What the drafting loop remembers of what it drafted and sent, until the verdict.

    Args:
        tentative: tokens that a restored session has; what was sent of them is not known.

    Attributes:
        sent_path: tentative tokens when the draft on its way was sent; 0 for none.
        resumed: the tentative tokens were written before the connection: they took no round.
    """

    def __init__(self, tentative: int) -> None:
        self.sent_path, self._sent_depth = tentative, 0
        self._sent_scores: tuple[float, ...] = ()
        self.resumed = False
        self._logprobs: dict[int, float] = {}  # of what was drafted last, by position
        self._steps: tuple[int, ...] = ()  # of the draft for the next round, or of the one on its way
        self._draft_s = 0.0

    def begin(self) -> None:
        """The answer goes on from tokens that were not drafted."""
        self._logprobs.clear()
        self.sent_path = 0

    def resume(self, tentative: int) -> None:
        """A connection is up. What is no offline text by now never will be; most of it is on its way again."""
        self.sent_path = self._sent_depth = tentative
        self._sent_scores = ()
        self._steps, self._draft_s, self.resumed = (), 0.0, tentative > 0

    def drafted(self, start: int, tree: DraftTree) -> list[int]:
        """The likeliest path of a tree, which goes on from position ``start``."""
        path = tree.likeliest_path()
        for at, index in enumerate(path):
            parent = tree.parents[index]
            self._logprobs[start + at] = tree.scores[index] - (tree.scores[parent - 1] if parent else 0.0)
        return [tree.tokens[index] for index in path]

    def took(self, steps: tuple[int, ...], seconds: float) -> None:
        """The draft for the next round took these."""
        self._steps, self._draft_s = steps, seconds

    def sent(self, tentative: int, tree: DraftTree) -> None:
        """A draft was sent; an empty ``tree`` of one that is not told, as after a connection."""
        self.sent_path, self._sent_depth = tentative, max(tree.depth, tentative)
        self._sent_scores = tree.likeliest_scores()

    def ended(self, verdict: Decided, waited_s: float) -> RoundEnded:
        """The round of the draft on its way."""
        steps, draft_s, depth = (self._steps, self._draft_s, self._sent_depth) if verdict.drafted else ((), 0.0, 0)
        accepted, depth = min(verdict.accepted, verdict.drafted), min(depth, verdict.drafted)
        self._steps, self._draft_s, self.sent_path = (), 0.0, 0
        scores, self._sent_scores = self._sent_scores[:depth], ()
        taken = draft_s, waited_s, verdict.compute_s
        return RoundEnded(verdict.supplied, verdict.drafted, depth, accepted, steps, *taken, verdict.sharing, scores)

    def logprobs(self, start: int, end: int) -> list[float]:
        """Of the tokens at these positions (nats); 0 of what was not drafted."""
        return [self._logprobs.get(at, 0.0) for at in range(start, end)]
