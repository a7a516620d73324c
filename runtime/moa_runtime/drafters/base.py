"""The contract of every drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class DraftToken:
    """One candidate and its log-probability (nats); after :class:`GumbelCoupling`, of being the target's choice."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Prices:
    """What the parts of a draft cost, each in tokens that the same time brings elsewhere.

    A part pays where it is expected to bring more: tokens a second are largest when all parts that pay are taken
    (Dinkelbach 1967, "On nonlinear fractional programming").

    Attributes:
        step: of a step of the model, however many nodes it continues.
        query: of each node that a step continues.
        node: of each token sent.
        follows: share of tokens that are right where those before them are.
    """

    step: float = 0.0
    query: float = 0.0
    node: float = 0.0
    follows: float = 1.0

    @property
    def token(self) -> float:
        """Of one more token of a chain: a step, which continues one node, and sending it."""
        return self.step + self.query + self.node


FREE = Prices()
GREEDY = Sampling()


@dataclass(frozen=True)
class Budget:
    """What a draft may be at most, and what its parts cost.

    Attributes:
        nodes: tokens sent.
        levels: tokens of a path that the model drafts; what it knows without a step may follow.
        width: nodes that each step continues.
        branches: whether a token may have several successors; else the draft is a chain.
        depth: tokens of a path.
        tentative: tokens at the prefix's end that the target has not confirmed.
        logprob: of these (nats).
    """

    nodes: int
    levels: int
    width: int = 1
    branches: bool = False
    depth: int = 1 << 30
    prices: Prices = FREE
    tentative: int = 0
    logprob: float = 0.0

    @classmethod
    def chain(cls, levels: int, nodes: int = 1024) -> Budget:
        """``levels`` tokens one behind the other, and what follows them without a step, ``nodes`` at most."""
        return cls(nodes, levels)

    @classmethod
    def tree(cls, nodes: int = 62, levels: int = 8, width: int = 10) -> Budget:
        """A tree; its size in EAGLE-2 (arXiv 2406.16858, section 5) where nothing is said."""
        return cls(nodes, levels, width, branches=True)

    def continued(self, logprobs: Sequence[float]) -> int:
        """How many nodes of a level the next step should continue; 0 where the step does not pay.

        Args:
            logprobs: of the paths to the nodes, best first (nats).
        """
        prices = self.prices
        cost = prices.query + prices.node
        gains = [math.exp(self.logprob + one) * prices.follows - cost for one in logprobs[: self.width]]
        gaining = [gain for gain in gains if gain >= 0.0]
        return len(gaining) if sum(gaining) >= prices.step else 0

    def sends(self, logprob: float) -> bool:
        """Whether a node is worth sending, by the log-probability of its path (nats)."""
        return math.exp(self.logprob + logprob) >= self.prices.node


class Drafter(Protocol):
    """Proposes what follows a prefix. Keeps caches, but every call names its whole prefix, so there is
    nothing to roll back: a drafter drops by itself what no longer matches."""

    @property
    def rows(self) -> int:
        """Memory rows held, for positions ``0..rows-1``."""

    @property
    def needs_rows(self) -> bool:
        """Whether its drafts are worthless without memory rows."""

    @property
    def stopping_rule(self) -> StoppingRule | None:
        """When it stops writing offline; None if it need not stop."""

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Store memory rows of committed tokens.

        Args:
            start: absolute position of the first row, at most :attr:`rows`; later rows held are replaced.
            keys, values: ``[n, kv_heads, head_dim]`` each.

        Raises:
            ValueError: a gap between the rows held and ``start``, or another shape.
        """

    def truncate_rows(self, length: int) -> None:
        """Forget the rows of positions ``length`` and above."""

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Draft tokens after ``prefix``, the conversation's tokens from position 0.

        If the target samples, a drafter may use ``sampling`` to guess with the target's own noise, see
        :class:`~moa_runtime.drafters.gumbel.GumbelCoupling`; the committed token is the target's choice in any
        case.

        The draft is as large as pays; its first level is always drafted if ``budget.levels`` allows any. A chain is a
        tree without branches. The draft is empty if there is nothing to propose, or if the context is full.
        """
