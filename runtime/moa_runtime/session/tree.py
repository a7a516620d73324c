"""Draft trees: parent indices, depths, and the path that a verdict accepts (SpecInfer, arXiv 2305.09781).

Parents are counted as on the wire: 0 is the last committed token, ``i`` the i-th drafted token. The tree
``a(b, c(d))`` is ``tokens=[a, b, c, d]``, ``parents=[0, 1, 1, 3]``; a chain of three is ``[0, 1, 2]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


class TreeError(ValueError):
    """Parents do not describe a tree in topological order."""


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens, parents before children.

    Attributes:
        tokens: token ids.
        parents: parent of each token: 0 is the last committed token, ``i`` the i-th drafted token.
        scores: log-probability of the path to each token (nats).
        steps: number of nodes that each step of the model expanded.

    Raises:
        TreeError: if the parents do not describe a tree, or the numbers of tokens, parents and scores differ.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.scores):
            lengths = f"{len(self.tokens)} tokens, {len(self.parents)} parents and {len(self.scores)} scores"
            raise TreeError(f"a tree has a parent and a score for each token, not {lengths}")
        check_parents(self.parents, len(self.tokens))

    @classmethod
    def chain(cls, tokens: Sequence[int], logprobs: Sequence[float], steps: Sequence[int] = ()) -> DraftTree:
        """Build a chain of tokens from their own log-probabilities (nats)."""
        return cls(tuple(tokens), tuple(chain(len(tokens))), tuple(accumulate(logprobs)), tuple(steps))

    @property
    def depth(self) -> int:
        """Number of levels."""
        return max(depths(self.parents), default=0)

    def likeliest_path(self) -> list[int]:
        """Return the indices of the path that follows the likeliest child."""
        children: dict[int, int] = {}  # the likeliest of each node
        for index, parent in enumerate(self.parents):
            if parent not in children or self.scores[index] > self.scores[children[parent]]:
                children[parent] = index
        path: list[int] = []
        node = 0
        while node in children:
            path.append(children[node])
            node = children[node] + 1
        return path

    def likeliest_scores(self) -> tuple[float, ...]:
        """Return the log-probability of :meth:`likeliest_path` up to each of its tokens (nats)."""
        return tuple(self.scores[index] for index in self.likeliest_path())

    def likeliest_chain(self) -> DraftTree:
        """Return :meth:`likeliest_path` as a tree of its own."""
        path = self.likeliest_path()
        return DraftTree(tuple(self.tokens[index] for index in path), tuple(chain(len(path))), self.likeliest_scores())

    def prepended(self, tokens: Sequence[int], logprobs: Sequence[float]) -> DraftTree:
        """Return the tree after a chain of ``tokens`` with their own log-probabilities (nats).

        ``a(b, c)`` with ``[x]`` prepended is ``x(a(b, c))``.
        """
        if not tokens:
            return self
        stem = DraftTree.chain(tokens, logprobs)
        return DraftTree(
            stem.tokens + self.tokens,
            stem.parents + tuple(parent + len(tokens) for parent in self.parents),
            stem.scores + tuple(stem.scores[-1] + score for score in self.scores),
            self.steps,
        )


def chain(length: int) -> list[int]:
    """Return the parents of a chain of ``length`` tokens."""
    return list(range(length))


def check_parents(parents: Sequence[int], length: int) -> list[int]:
    """Return the parents of ``length`` tokens; an empty list means a chain.

    Raises:
        TreeError: if the number of parents is wrong, or one is not an earlier token.
    """
    if not parents:
        return chain(length)
    if len(parents) != length:
        raise TreeError(f"{length} draft tokens need {length} parents, not {len(parents)}")
    for index, parent in enumerate(parents):
        if not 0 <= parent <= index:
            raise TreeError(f"parent {parent} of draft token {index + 1} is no earlier token")
    return list(parents)


def depths(parents: Sequence[int]) -> list[int]:
    """Return each token's depth: 1 for children of the last committed token. ``[0, 1, 1, 3]`` -> ``[1, 2, 2, 3]``."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == 0 else found[parent - 1] + 1)
    return found


def accepted_path(tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Return the path that the target accepts.

    Args:
        tokens, parents: the tree.
        choices: the target's choices after the last committed token and after each drafted token, of length
            ``len(tokens) + 1``.

    Returns:
        indices into ``tokens`` of the accepted path. With ``tokens=[5, 6, 7]`` as a chain and
        ``choices=[5, 6, 9, 1]`` it is ``[0, 1]``; the bonus token is then ``choices[2] == 9``.
    """
    return walk(tokens, parents, choices.__getitem__)[0]


def walk(tokens: Sequence[int], parents: Sequence[int], choice: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk down the tree as the target would, from the last committed token.

    Args:
        tokens, parents: the tree.
        choice: returns the target's choice after a node: 0, or a drafted token counted from 1. It is called only for
            the nodes of the path.

    Returns:
        the accepted path as in :func:`accepted_path`, and the target's choice after it.
    """
    children: dict[tuple[int, int], int] = {}  # by parent and token; of equal ones the first
    for index, child in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(child, index)
    path: list[int] = []
    node = 0
    while True:
        chosen = choice(node)
        step = children.get((node, chosen))
        if step is None:
            return path, chosen
        path.append(step)
        node = step + 1


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens from the root to a node, itself included. Node 0 is the root, ``i`` the i-th drafted token."""
    path: list[int] = []
    while node:
        path.append(tokens[node - 1])
        node = parents[node - 1]
    return path[::-1]


def subtree_after(
    tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], levels: int
) -> tuple[list[int], list[int]]:
    """Return what a tree proposes after the tokens ``path``, which were committed since it was drafted.

    Returns:
        indices into ``tokens`` of the nodes of the first ``levels`` levels, and their parents among each other; none if
        the path leaves the tree or ends at a leaf. ``a(b, c(d))`` after ``[a]`` is ``([1, 2, 3], [0, 0, 2])``.
    """
    steps = iter([*path, -1])
    found, _ = walk(tokens, parents, lambda _: next(steps))
    if len(found) < len(path):
        return [], []
    numbers = {found[-1] + 1 if found else 0: (0, 0)}  # node of the tree: number and depth in what is left
    kept: list[int] = []
    left: list[int] = []
    for index, parent in enumerate(parents):
        number, depth = numbers.get(parent, (0, levels))
        if depth < levels:
            kept.append(index)
            left.append(number)
            numbers[index + 1] = len(kept), depth + 1
    return kept, left


def parents_among(kept: Sequence[int], parents: Sequence[int], root: int = 0) -> list[int]:
    """Return the parents of the tokens with the ascending indices ``kept``, counted among these; ``root`` becomes 0.

    ``parents_among([0, 2], [0, 0, 1])`` is ``[0, 1]``.
    """
    places = {root: 0, **{index + 1: place for place, index in enumerate(kept, 1)}}
    return [places[parents[index]] for index in kept]


#: Steps of a confidence byte for each nat.
_STEPS_PER_NAT = 16
_PROBABILITIES = tuple(math.exp(-step / _STEPS_PER_NAT) for step in range(256))


def encode_confidences(parents: Sequence[int], scores: Sequence[float]) -> bytes:
    """Encode the probability of each token after its parent's path: ``min(255, floor(-16 ln p + 0.5))``, one byte each.

    Args:
        parents, scores: as of a :class:`DraftTree`. A probability above 1 counts as 1, one that is not a number as 0.
    """

    def steps(score: float, before: float) -> int:
        nats = before - score
        if nats <= 0:
            return 0
        return math.floor(nats * _STEPS_PER_NAT + 0.5) if nats < 255 / _STEPS_PER_NAT else 255

    paths = [0.0, *scores]
    return bytes(steps(score, paths[parent]) for score, parent in zip(scores, parents, strict=True))


def decode_confidences(data: bytes) -> tuple[float, ...]:
    """Return the probabilities that confidence bytes stand for, from ``exp(-255 / 16)`` to 1; none for no bytes."""
    return tuple(map(_PROBABILITIES.__getitem__, data))
