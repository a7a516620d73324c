"""The draft that awaits its verdict."""

from __future__ import annotations

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.events import Decided
from moa_runtime.session.tree import DraftTree


class DraftInFlight:
    """Remember what was drafted and sent, until the verdict.

    Args:
        tentative: number of tentative tokens of a restored session, any of which may have been sent.

    Attributes:
        sent_path: number of tentative tokens when the draft in flight was sent; 0 for none.
        resumed: whether the tentative tokens were written before the connection, so that they belong to no round.
    """

    def __init__(self, tentative: int) -> None:
        self.sent_path, self._sent_depth = tentative, 0
        self._sent_scores: tuple[float, ...] = ()
        self.resumed = False
        self._logprobs: dict[int, float] = {}  # of the tokens drafted last, by position
        self._steps: tuple[int, ...] = ()  # of the draft in flight
        self._draft_s = 0.0

    def begin(self) -> None:
        """Note that the answer continues after tokens that were not drafted."""
        self._logprobs.clear()
        self.sent_path = 0

    def resume(self, tentative: int) -> None:
        """Note that a connection is up: the ``tentative`` tokens belong to no round, and most are in flight again."""
        self.sent_path = self._sent_depth = tentative
        self._sent_scores = ()
        self._steps, self._draft_s, self.resumed = (), 0.0, tentative > 0

    def drafted(self, start: int, tree: DraftTree) -> list[int]:
        """Return the likeliest path of ``tree``, which begins at position ``start``, and remember its probabilities."""
        path = tree.likeliest_path()
        for at, index in enumerate(path):
            parent = tree.parents[index]
            self._logprobs[start + at] = tree.scores[index] - (tree.scores[parent - 1] if parent else 0.0)
        return [tree.tokens[index] for index in path]

    def sent(self, tentative: int, tree: DraftTree, seconds: float) -> None:
        """Note that a draft of the ``tentative`` tokens was sent, with the branches of ``tree``, in ``seconds``."""
        self._steps, self._draft_s = tree.steps, seconds
        self.sent_path, self._sent_depth = tentative, max(tree.depth, tentative)
        self._sent_scores = tree.likeliest_scores()

    def ended(self, verdict: Decided, waited_s: float) -> RoundEnded:
        """Return the round that ``verdict`` ended, ``waited_s`` seconds after its draft was sent."""
        steps, draft_s, depth = (self._steps, self._draft_s, self._sent_depth) if verdict.drafted else ((), 0.0, 0)
        accepted, depth = min(verdict.accepted, verdict.drafted), min(depth, verdict.drafted)
        self._steps, self._draft_s, self.sent_path = (), 0.0, 0
        scores, self._sent_scores = self._sent_scores[:depth], ()
        taken = draft_s, waited_s, verdict.compute_s
        return RoundEnded(verdict.supplied, verdict.drafted, depth, accepted, steps, *taken, scores, verdict.sent)

    def knows(self, start: int, end: int) -> bool:
        """Return whether the tokens at these positions were drafted, so that their probabilities are known."""
        return all(at in self._logprobs for at in range(start, end))

    def logprobs(self, start: int, end: int) -> list[float]:
        """Return the log-probabilities (nats) of the tokens at these positions; 0 for those that were not drafted."""
        return [self._logprobs.get(at, 0.0) for at in range(start, end)]
