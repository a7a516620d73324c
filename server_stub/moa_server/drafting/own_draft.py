"""A draft of the verifier's own, and copies of the conversation as such a draft."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moa_runtime.drafters.gumbel import GumbelCoupling
from moa_runtime.drafters.ngram import LONGEST_SUFFIX, NgramMixture
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, depths


@dataclass(frozen=True)
class OwnDraft:
    """Drafted tokens, parents before children.

    Attributes:
        tokens, parents: as in :mod:`moa_runtime.session.tree`.
        probabilities: of each token if its parent is right, as its drafter claims.
        modelled: whether the drafter's model took steps for it; else it consists of copies.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    modelled: bool = False

    @classmethod
    def of(cls, tree: DraftTree) -> OwnDraft:
        """Make the draft of a drafter's tree."""
        before = (0.0, *tree.scores)
        own = [math.exp(score - before[parent]) for score, parent in zip(tree.scores, tree.parents, strict=True)]
        return cls(tree.tokens, tree.parents, tuple(own), bool(tree.steps))

    @property
    def paths(self) -> list[float]:
        """Claimed probability of the path to each token."""
        paths = [1.0]
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            paths.append(paths[parent] * probability)
        return paths[1:]

    def after(self, tokens: Sequence[int]) -> OwnDraft:
        """Return what is left of the draft after ``tokens``; nothing if they are not a path of it."""
        root = 0
        for token in tokens:
            matching = (i for i, own in enumerate(self.tokens, 1) if own == token and self.parents[i - 1] == root)
            root = next(matching, -1)
            if root < 0:
                return NOTHING
        places = {root: 0}
        for number, parent in enumerate(self.parents, 1):
            if parent in places and number != root:
                places[number] = len(places)
        kept = [number - 1 for number in places if number != root]
        return self._only(kept, places)

    def cut(self, depth: int) -> OwnDraft:
        """Return the tokens of the first ``depth`` levels."""
        kept = [index for index, level in enumerate(depths(self.parents)) if level <= depth]
        if len(kept) == len(self.tokens):
            return self
        places = {0: 0, **{index + 1: at for at, index in enumerate(kept, 1)}}
        return self._only(kept, places)

    def _only(self, kept: Sequence[int], places: Mapping[int, int]) -> OwnDraft:
        """Return the tokens at the indices ``kept``; ``places`` maps old parents to new ones."""
        parents = tuple(places[self.parents[index]] for index in kept)
        tokens = tuple(self.tokens[index] for index in kept)
        return OwnDraft(tokens, parents, tuple(self.probabilities[index] for index in kept), self.modelled)


NOTHING = OwnDraft()

#: Most tokens of a draft of copies, and of a sampled answer, each of which takes some 40 microseconds.
_MOST, _MOST_SAMPLED = 16, 4
#: Least claimed log-probability of a path to a copy (nats).
_LEAST = math.log(0.03)


def copied(mixture: NgramMixture, prefix: Sequence[int], sampling: Sampling, depth: int, *, branches: bool) -> OwnDraft:
    """Return the likeliest copies after ``prefix``, which the mixture has indexed: at most ``depth`` tokens of a path,
    and with ``branches`` several tokens after one.

    A path whose first token has no match takes some 2 microseconds, each token some 4.
    """
    coupling, most = GumbelCoupling(sampling), _MOST_SAMPLED if sampling.temperature > 0 else _MOST
    tail, before = list(prefix[-LONGEST_SUFFIX:]), max(0, len(prefix) - LONGEST_SUFFIX)
    tokens, parents, own = list[int](), list[int](), list[float]()
    waiting: list[
        tuple[float, int, int, int, float, list[int]]
    ] = []  # the likeliest path first, of equals the earliest
    added = 0

    def add(node: int, score: float, path: list[int]) -> None:
        nonlocal added
        for one in mixture.followers(path, before + len(path), coupling)[: None if branches else 1]:
            if score + one.logprob < _LEAST:
                break
            added += 1
            heapq.heappush(waiting, (-score - one.logprob, added, node, one.token, one.logprob, path))

    if depth > 0:
        add(0, 0.0, tail)
    while waiting and len(tokens) < most:
        cost, _, parent, token, logprob, path = heapq.heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        own.append(math.exp(logprob))
        if len(path) + 1 - len(tail) < depth:
            add(len(tokens), -cost, [*path, token])
    return OwnDraft(tuple(tokens), tuple(parents), tuple(own))
