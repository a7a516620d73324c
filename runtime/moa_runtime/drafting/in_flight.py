"""Drafts under way: the one that awaits its verdict, and the one that is compared with the server's own text."""

from __future__ import annotations

from collections.abc import Sequence

from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.events import Decided
from moa_runtime.session.tree import DraftTree, depths, walk


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
        return RoundEnded(verdict.supplied, verdict.drafted, depth, accepted, steps, *taken, verdict.sharing, scores)

    def logprobs(self, start: int, end: int) -> list[float]:
        """Return the log-probabilities (nats) of the tokens at these positions; 0 for those that were not drafted."""
        return [self._logprobs.get(at, 0.0) for at in range(start, end)]


class ShadowDraft:
    """Compare drafts that are not sent, one at a time, with the text that the server streams meanwhile.

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
            round_s: time of a round without a draft, seconds.
            token_s: time of each drafted token, seconds.
            sharing: number of sessions that share the target.
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
