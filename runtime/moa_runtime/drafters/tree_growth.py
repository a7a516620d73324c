"""Draft trees that follow the drafter's own confidence (EAGLE-2, arXiv 2406.16858, section 4).

A tree grows level by level: the likeliest nodes of a level are continued, each by its likeliest tokens. In the end the
likeliest nodes of all are kept. A node's score is the log-probability of the whole path to it, which falls along every
path, so the kept nodes are a tree too. After the last level, paths may continue with copies.

Tokens that a grammar forces take no level. The verifier commits them itself, so at the end of a path they bring no more
than a token after them that the target chooses in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.session.tree import DraftTree


class Continuation(NamedTuple):
    """A token that takes no step, and the forced ones before it."""

    forced: list[int]
    token: DraftToken


class Expansion(NamedTuple):
    """What the next step continues: ``n`` nodes, with ``t >= n`` tokens that the model has not read.

    Attributes:
        paths: of the nodes, tokens from the tree's first level on: ``[n]``; empty if no step pays.
        tokens, depths: tokens to read, and the number of tokens before each on its path: ``[t]``.
        queries: indices of the nodes among these tokens: ``[n]``.
        mask: which of the ``e`` tokens read earlier and of these are on the path of each: ``[t, e + t]``.
    """

    paths: list[list[int]]
    tokens: list[int]
    depths: list[int]
    queries: list[int]
    mask: NDArray[np.bool_]


class GrowingTree:
    """A tree while it grows. Nodes are numbered from 0 in the order in which they were added.

    Args:
        budget: limits and prices.
        stop_tokens: ids that end a turn; they are not continued.
    """

    def __init__(self, budget: Budget, stop_tokens: Collection[int] = ()) -> None:
        self.depth = 0
        self._budget, self._stop_tokens = budget, stop_tokens
        self._tokens: list[int] = []
        self._parents: list[int] = []  # -1 is the last token of the prefix
        self._scores: list[float] = []
        self._forced = set[int]()
        self._level: range = range(0)
        self._expanded: list[int] = []
        self._read: list[int] = []  # expanded nodes, and the forced ones before them
        self._reads = 1  # tokens that the next step reads
        self._steps: list[int] = []

    def add_level(self, continuations: Sequence[Sequence[DraftToken]], *, stepped: bool = True) -> None:
        """Add a level: candidates after each of :meth:`expand`'s nodes, or after the prefix for the first level.

        Args:
            stepped: whether a step of the model made them.
        """
        parents = self._expanded[len(self._expanded) - len(continuations) :] if self._tokens else [-1]
        first = len(self._tokens)
        if stepped:
            self._steps.append(self._reads)
        for parent, candidates in zip(parents, continuations, strict=True):
            for candidate in candidates:
                self._add(candidate, parent)
        self._level = range(first, len(self._tokens))
        self.depth += 1

    def expand(self, forced: Callable[[list[int]], list[int]] | None = None) -> Expansion:
        """Choose the nodes of the newest level to continue.

        Args:
            forced: returns the tokens that must follow a path; the node after these is continued in its place.
        """
        likeliest = self._likeliest()
        chosen = likeliest[: self._budget.continued([self._scores[node] for node in likeliest])]
        read, queries = list[int](), list[int]()
        for node in chosen:
            path = [self._tokens[each] for each in self._path(node)]
            run = forced(path) if forced else []
            if (run or self._forced) and len(path) + len(run) >= self._budget.depth:
                continue
            if run and run[-1] in self._stop_tokens:
                continue
            read.append(node)
            for token in run:
                node = self._add(DraftToken(token, 0.0), node)
                self._forced.add(node)
                read.append(node)
            queries.append(len(read) - 1)
        before, self._reads = len(self._read), len(read)
        self._read += read
        self._expanded += [read[query] for query in queries]
        column = {node: at for at, node in enumerate(self._read)}
        mask = np.zeros((len(read), before + len(read)), np.bool_)
        paths = [self._path(node) for node in read]
        for row, nodes in enumerate(paths):
            mask[row, [column[node] for node in nodes]] = True
        texts = [[self._tokens[node] for node in paths[query]] for query in queries]
        tokens = [self._tokens[node] for node in read]
        return Expansion(texts, tokens, [len(nodes) - 1 for nodes in paths], queries, mask)

    def lengthen(self, known: Callable[[list[int]], Iterable[Continuation]], room: int) -> None:
        """Continue the newest level's likeliest nodes by a chain each, while its nodes can be among those kept.

        Args:
            known: returns what follows a path, perhaps without end.
            room: maximal number of tokens of a chain after a node without forced ones before it.
        """
        kept = sorted(self._scores, reverse=True)[: self._budget.nodes]
        least = kept[-1] if len(kept) == self._budget.nodes else -math.inf
        for node in self._likeliest():
            nodes = self._path(node)
            left = min(room - len(self._forced.intersection(nodes)), self._budget.nodes)
            for run, follower in known([self._tokens[each] for each in nodes]):
                left -= len(run) + 1
                score = self._scores[node] + follower.logprob
                if left < 0 or score <= least or not self._budget.sends(score):
                    break
                for token in run:
                    node = self._add(DraftToken(token, 0.0), node)
                    self._forced.add(node)
                node = self._add(follower, node)

    def _likeliest(self) -> list[int]:
        """Return the nodes of the newest level to continue, best first."""
        going_on = (node for node in self._level if self._tokens[node] not in self._stop_tokens)
        return sorted(going_on, key=lambda node: -self._scores[node])[: self._budget.width]

    def _add(self, token: DraftToken, parent: int) -> int:
        self._tokens.append(token.token)
        self._parents.append(parent)
        self._scores.append(token.logprob + (self._scores[parent] if parent >= 0 else 0.0))
        return len(self._tokens) - 1

    def _path(self, node: int) -> list[int]:
        """Return the nodes from the first level to ``node``."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def best(self, forced: Callable[[list[int]], list[int]] | None = None) -> DraftTree:
        """Return the tree of the likeliest nodes that are worth sending, at least of the likeliest one.

        Args:
            forced: see :meth:`expand`.
        """
        ranked = sorted(range(len(self._tokens)), key=lambda node: -self._scores[node])[: self._budget.nodes]
        worth = [node for node in ranked if self._budget.sends(self._scores[node])]
        kept = sorted(worth or ranked[:1])  # a parent was added before its children
        if forced is not None:
            kept = self._without_forced_ends(kept)
            kept += self._worthy_ends(kept, forced)
        number = {-1: 0, **{node: at for at, node in enumerate(kept, 1)}}
        return DraftTree(
            tuple(self._tokens[node] for node in kept),
            tuple(number[self._parents[node]] for node in kept),
            tuple(self._scores[node] for node in kept),
            tuple(self._steps),
        )

    def _without_forced_ends(self, nodes: list[int]) -> list[int]:
        """Return the nodes that are not forced, and the forced ones before these."""
        kept, needed = list[int](), set[int]()
        for node in reversed(nodes):
            if node not in self._forced or node in needed:
                kept.append(node)
                needed.add(self._parents[node])
        return kept[::-1]

    def _worthy_ends(self, nodes: list[int], forced: Callable[[list[int]], list[int]]) -> list[int]:
        """Add nodes of the tokens that are forced after its ends, where these pay, and return them."""
        ends, added = sorted(set(nodes).difference(self._parents[node] for node in nodes)), list[int]()
        for node in sorted(ends, key=lambda node: -self._scores[node]):
            path = [self._tokens[each] for each in self._path(node)]
            run = forced(path) if path[-1] not in self._stop_tokens else []
            room = min(self._budget.nodes - len(nodes) - len(added), self._budget.depth - len(path))
            if len(run) <= room and self._budget.sends_forced(self._scores[node], run, self._stop_tokens):
                for token in run:
                    node = self._add(DraftToken(token, 0.0), node)
                    added.append(node)
        return added
