"""Draft trees that follow the drafter's own confidence (EAGLE-2, arXiv 2406.16858, section 4).

A tree grows level by level: the likeliest nodes of a level are continued, each by its likeliest tokens. In the end the
likeliest nodes of all are kept. A node's score is the log-probability of the whole path to it, which falls along every
path, so the kept nodes are a tree too. After the last level, paths may continue with copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.session.tree import DraftTree


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
        self._level: range = range(0)
        self._expanded: list[int] = []
        self._steps: list[int] = []

    def add_level(self, continuations: Sequence[Sequence[DraftToken]], *, stepped: bool = True) -> None:
        """Add a level: candidates after each of :meth:`expand`'s nodes, or after the prefix for the first level.

        Args:
            stepped: whether a step of the model made them.
        """
        parents = self._expanded[len(self._expanded) - len(continuations) :] if self._tokens else [-1]
        first = len(self._tokens)
        if stepped:
            self._steps.append(len(parents))
        for parent, candidates in zip(parents, continuations, strict=True):
            for candidate in candidates:
                self._add(candidate, parent)
        self._level = range(first, len(self._tokens))
        self.depth += 1

    def expand(self) -> tuple[list[list[int]], NDArray[np.bool_]]:
        """Choose the nodes of the newest level to continue.

        Returns:
            their paths ``[n][depth]``, tokens from the tree's first level to the node itself (empty if no step pays),
            and a mask ``[n, e + n]``: for each, the nodes on its path among the ``e`` expanded earlier and these ``n``.
        """
        likeliest = self._likeliest()
        chosen = likeliest[: self._budget.continued([self._scores[node] for node in likeliest])]
        before = len(self._expanded)
        self._expanded += chosen
        column = {node: at for at, node in enumerate(self._expanded)}
        mask = np.zeros((len(chosen), before + len(chosen)), np.bool_)
        paths = [self._path(node) for node in chosen]
        for row, path in enumerate(paths):
            mask[row, [column[node] for node in path]] = True
        return [[self._tokens[node] for node in path] for path in paths], mask

    def lengthen(self, known: Callable[[list[int]], Iterable[DraftToken]], room: int) -> None:
        """Continue the newest level's likeliest nodes by a chain each, while its nodes can be among those kept.

        Args:
            known: returns the tokens after a path, perhaps without end.
            room: maximal number of tokens of a chain.
        """
        kept = sorted(self._scores, reverse=True)[: self._budget.nodes]
        least = kept[-1] if len(kept) == self._budget.nodes else -math.inf
        for node in self._likeliest():
            path = [self._tokens[earlier] for earlier in self._path(node)]
            for follower in islice(known(path), min(room, self._budget.nodes)):
                score = self._scores[node] + follower.logprob
                if score <= least or not self._budget.sends(score):
                    break
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

    def best(self) -> DraftTree:
        """Return the tree of the likeliest nodes that are worth sending, at least of the likeliest one."""
        ranked = sorted(range(len(self._tokens)), key=lambda node: -self._scores[node])[: self._budget.nodes]
        worth = [node for node in ranked if self._budget.sends(self._scores[node])]
        kept = sorted(worth or ranked[:1])  # a parent was added before its children
        number = {-1: 0, **{node: at for at, node in enumerate(kept, 1)}}
        return DraftTree(
            tuple(self._tokens[node] for node in kept),
            tuple(number[self._parents[node]] for node in kept),
            tuple(self._scores[node] for node in kept),
            tuple(self._steps),
        )
