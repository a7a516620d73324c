"""Drafts made while the server streams: sent without being asked for, and compared with the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.tree import DraftTree, depths, parents_among, walk

_LONGEST_LEAD = 6  # tokens after which hardly a draft is right
_SLACK = 0.1  # part of an interval by which a draft is early
_NEWEST = 0.2  # least weight of the newest time of a level
_FADE = 0.98  # of that time with each draft without steps, so that a slow model is tried again


@dataclass(frozen=True)
class Pace:
    """The pace of a server that streams.

    Attributes:
        tokens: mean number of tokens of a verdict.
        interval_s: mean time between verdicts, seconds.
        round_trip_s: round trip time of the link, seconds.
    """

    tokens: float
    interval_s: float
    round_trip_s: float


@dataclass(frozen=True)
class _Undecided:
    start: int
    tree: DraftTree
    seconds: float


class UnsolicitedDrafts:
    """The drafts of a device while the server streams, until the text decides them.

    The server verifies the part of a draft that follows the tokens committed since. Whether it did or not, the text
    shows how much of the draft was right, and so the round that it would have made if the server had waited for it.

    Attributes:
        next: length of the shortest prefix for the next draft, so that each position is drafted once.
    """

    def __init__(self) -> None:
        self.next = 0
        self._undecided: list[_Undecided] = []
        self._level_s, self._timed = 0.0, 0  # mean seconds of a level, and number of drafts that it was learnt from
        self._reads = True  # whether the next draft also reads a prompt

    def forget(self) -> None:
        """Drop the drafts: the conversation's text has changed."""
        self._undecided.clear()
        self.next, self._reads = 0, True

    def begin(self, start: int, tree: DraftTree, seconds: float, usual: Budget) -> None:
        """Take a draft after the first ``start`` tokens, made in ``seconds``; ``usual``: budget of a round."""
        self.next = start + 1
        if tree.steps:
            reads, self._reads = self._reads, False
            if reads:
                return  # it took longer than later ones will
            level_s = seconds / len(tree.steps)
            self._timed += 1
            self._level_s += max(_NEWEST, 1 / self._timed) * (level_s - self._level_s)
            asked = _within(usual, tree)
            tree, seconds = asked, level_s * len(asked.steps)
        else:
            self._level_s *= _FADE
        self._undecided.append(_Undecided(start, tree, seconds))

    def budget(self, usual: Budget, pace: Pace) -> Budget:
        """Return the budget of a draft that arrives in time to be verified; without levels if the model is too slow.

        A draft for the ``n``-th pass from now has to arrive within ``n`` intervals, and its first tokens, the *lead*,
        are committed by then. So it is deeper than the ``usual`` draft of a round by the lead, and its parts are priced
        as if the lead were right: otherwise nothing of it counts. A model that needs longer for a level than the
        server for a token would not win by rounds either. One whose time is unknown drafts one token, because text that
        arrives meanwhile waits for the draft.
        """
        if usual.levels and not self._timed:
            return replace(usual, nodes=min(1, usual.nodes), levels=1)
        level_s, lead, passes = self._level_s, pace.tokens, 1
        while usual.levels and lead < _LONGEST_LEAD:
            time_s, levels = (passes - _SLACK) * pace.interval_s - pace.round_trip_s, usual.levels + math.ceil(lead)
            if level_s:
                levels = min(levels, math.floor(time_s / level_s))
            if time_s >= 0.0 and levels > lead:
                return replace(usual, levels=levels, prices=usual.prices.scaled(usual.prices.follows**lead))
            passes += 1
            lead = passes * pace.tokens
        return replace(usual, levels=0)

    def decided(self, committed: Sequence[int], round_s: float, token_s: float) -> list[RoundEnded]:
        """Remove the drafts that the text decides; return the rounds that they would have made.

        Args:
            committed: the conversation's tokens.
            round_s: time of a round without a draft, seconds.
            token_s: time of each drafted token, seconds.
        """
        ended: list[RoundEnded] = []
        undecided: list[_Undecided] = []
        for draft in self._undecided:
            tree, known = draft.tree, committed[draft.start :]
            accepted = _common_levels(tree, known)
            if accepted == len(known):
                undecided.append(draft)  # the next token decides
                continue
            counts = 0, len(tree.tokens), tree.depth, accepted, tree.steps
            taken = draft.seconds, round_s + token_s * len(tree.tokens), None
            ended.append(RoundEnded(*counts, *taken, scores=tree.likeliest_scores()))
        self._undecided = undecided
        return ended


def _common_levels(tree: DraftTree, tokens: Sequence[int]) -> int:
    """Return the number of ``tokens`` that are a path of ``tree``, from its first level on."""
    levels = [0, *depths(tree.parents)]
    path, _ = walk(tree.tokens, tree.parents, lambda node: tokens[levels[node]] if levels[node] < len(tokens) else -1)
    return len(path)


def _within(budget: Budget, tree: DraftTree) -> DraftTree:
    """Return the part of ``tree`` that a smaller budget would have given."""
    levels, depth = depths(tree.parents), 1
    while depth < budget.levels:
        level_scores = (score for score, level in zip(tree.scores, levels, strict=True) if level == depth)
        if not budget.continued(sorted(level_scores, reverse=True)):
            break
        depth += 1
    kept = [at for at, level in enumerate(levels) if level <= depth and budget.sends(tree.scores[at])]
    tokens, scores = tuple(tree.tokens[at] for at in kept), tuple(tree.scores[at] for at in kept)
    return DraftTree(tokens, tuple(parents_among(kept, tree.parents)), scores, tree.steps[:depth])
