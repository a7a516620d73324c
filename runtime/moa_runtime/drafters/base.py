"""The protocol of drafters, and the shape and prices of drafts."""

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
    """One candidate and its log-probability (nats); after :class:`GumbelCoupling`, that of being chosen."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Prices:
    """Costs of the parts of a draft, in tokens that the same time brings elsewhere.

    A part pays if it is expected to bring more: tokens per second are largest when all parts that pay are taken
    (Dinkelbach 1967, "On nonlinear fractional programming").

    Attributes:
        step: cost of a step of the model, for any number of nodes.
        query: cost of each node that a step continues.
        node: cost of each token sent.
        follows: share of tokens that are right if those before them are.
    """

    step: float = 0.0
    query: float = 0.0
    node: float = 0.0
    follows: float = 1.0

    @property
    def token(self) -> float:
        """Cost of one more token of a chain: a step that continues one node, and sending it."""
        return self.step + self.query + self.node

    def scaled(self, factor: float) -> Prices:
        """Return the prices with all costs multiplied by ``factor``."""
        return Prices(factor * self.step, factor * self.query, factor * self.node, self.follows)


FREE = Prices()
GREEDY = Sampling()


@dataclass(frozen=True)
class Budget:
    """Limits of a draft, and the costs of its parts.

    Attributes:
        nodes: maximal number of tokens sent.
        levels: maximal number of tokens of a path that take a step of a model. Copies may follow them, and a drafter
            without a model may ignore it.
        width: maximal number of nodes that each step continues.
        branches: whether a token may have several successors; else the draft is a chain.
        depth: maximal number of tokens of a path.
        tentative: number of tokens at the prefix's end that the target has not confirmed.
        logprob: log-probability of these (nats).
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
        """Return the budget of a chain of ``levels`` tokens and copies after them, at most ``nodes`` in all."""
        return cls(nodes, levels)

    @classmethod
    def tree(cls, nodes: int = 62, levels: int = 8, width: int = 10) -> Budget:
        """Return the budget of a tree, by default of the size in EAGLE-2 (arXiv 2406.16858, section 5)."""
        return cls(nodes, levels, width, branches=True)

    def continued(self, logprobs: Sequence[float]) -> int:
        """Return the number of nodes of a level that the next step should continue; 0 if the step does not pay.

        Args:
            logprobs: log-probabilities of the paths to the nodes (nats), best first.
        """
        prices = self.prices
        cost = prices.query + prices.node
        gains = [math.exp(self.logprob + one) * prices.follows - cost for one in logprobs[: self.width]]
        gaining = [gain for gain in gains if gain >= 0.0]
        return len(gaining) if sum(gaining) >= prices.step else 0

    def sends(self, logprob: float) -> bool:
        """Return whether a node is worth sending, by the log-probability of its path (nats)."""
        return math.exp(self.logprob + logprob) >= self.prices.node


class Drafter(Protocol):
    """Propose the tokens that follow a prefix.

    Every call names its whole prefix, so nothing has to be rolled back: a drafter drops the cache entries that no
    longer match.
    """

    @property
    def rows(self) -> int:
        """Number of memory rows held, for positions ``0..rows-1``."""

    @property
    def needs_rows(self) -> bool:
        """Whether its drafts are worthless without memory rows."""

    @property
    def stopping_rule(self) -> StoppingRule | None:
        """Rule by which it stops writing offline; None if it need not stop."""

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Store memory rows of committed tokens.

        Args:
            start: absolute position of the first row, at most :attr:`rows`; later rows held are replaced.
            keys, values: float32 ``[n, kv_heads, head_dim]`` each.

        Raises:
            ValueError: if there is a gap before ``start``, or the shape differs.
        """

    def truncate_rows(self, length: int) -> None:
        """Drop the rows from position ``length`` on."""

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Draft tokens after ``prefix``, the conversation's tokens from position 0; there is at least one.

        If the target samples, a drafter may use ``sampling`` to guess with the target's own noise, see
        :class:`~moa_runtime.drafters.gumbel.GumbelCoupling`; the committed token is always the target's choice.
        Tokens that its grammar forbids are wasted: :class:`~moa_runtime.drafters.grammar_mask.GrammarMask`.

        The draft is as large as pays; its first level is always drafted if ``budget.levels`` is not 0. A chain is a
        tree without branches. The draft is empty if there is nothing to propose, or if the context is full.
        """


class RowlessDrafter:
    """Base of drafters without a model. They use no memory rows, and write nothing offline: without the target their
    text ends in nonsense."""

    rows = 0
    needs_rows = False
    stopping_rule: StoppingRule | None = StoppingRule(longest=0)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Ignore memory rows."""

    def truncate_rows(self, length: int) -> None:
        """Ignore memory rows."""
