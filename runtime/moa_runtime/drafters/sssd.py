"""Drafts without a model, from the tokens that followed the same words before: SSSD (arXiv 2411.05894).

Continuations of the text in the conversation (prompt and own output) and in a datastore of earlier texts are counted,
and merged into one tree by the paper's scores. The numbers are those of the paper's authors
(github.com/huawei-csl/sssd_speculator), who found them by a grid search over several models and tasks.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import NamedTuple

from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import GREEDY, Budget, DraftToken, RowlessDrafter
from moa_runtime.drafters.grammar_mask import GrammarMask
from moa_runtime.drafters.gumbel import GumbelCoupling
from moa_runtime.drafters.ngram import LONGEST_SUFFIX, REACH, NgramIndex, worth_copying
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree, path_to

#: Suffixes of the conversation that are looked up in it, and the occurrences of each that count, the latest.
_LONGEST_IN_CONVERSATION = 3
#: Discounts of the conversation's shares: of the first token, and of each later one, plus a part for each token of the
#: suffix.
_FIRST_SHARE, _LATER_SHARE, _SHARE_OF_A_TOKEN = 0.6, 0.6, 0.1
#: Continuations at most of one suffix; and how many are enough, so that no shorter suffix is looked up.
_MOST_OF_A_SUFFIX, _ENOUGH = 100, 50
_LONGEST_BRANCH = 32


class SssdDrafter(RowlessDrafter):
    """A drafter without a model, whose trees take no step.

    A node's score is the product of shares along its path: the share of the occurrences so far that continued with its
    token, in the conversation times a discount. If several sources know a node, it has the best of their scores. The
    likeliest nodes make the tree (section 3). The budget decides their number. The paper's rule (section 4) fills what
    the hardware computes while it reads the weights. Here a token is added while it is expected to bring more than it
    costs; costs come from the times in verdicts and grow with the number of conversations.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
        datastore: earlier texts, if any.
    """

    def __init__(self, stop_tokens: Collection[int] = (), datastore: Datastore | None = None) -> None:
        self._stop_tokens, self._datastore = frozenset(stop_tokens), datastore
        self._index = NgramIndex(stop_tokens)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Draft the likeliest nodes that are worth sending, whatever ``budget.levels`` are: none takes a step.

        Without ``branches`` it is a chain, which goes beyond the levels while it is :func:`worth_copying`. A grammar's
        forced tokens come first. See :meth:`moa_runtime.drafters.base.Drafter.propose`.
        """
        if budget.tentative >= REACH:
            return DraftTree()
        self._index.update(prefix[: len(prefix) - budget.tentative])
        stem = GrammarMask(sampling, prefix).forced()[: min(budget.depth, budget.nodes)]
        text, logprobs = [*prefix, *stem] if stem else prefix, [0.0] * len(stem)
        if not self._stop_tokens.isdisjoint(stem):
            return DraftTree.chain(stem, logprobs)
        budget = replace(budget, depth=budget.depth - len(stem), nodes=budget.nodes - len(stem))
        tree = _MergedTree(budget, GumbelCoupling(sampling), GrammarMask(sampling, text), len(text))
        for share, later_share, continuations in self._sources(text[-LONGEST_SUFFIX:]):
            tree.offer(continuations, share, later_share)
        return tree.grown().prepended(stem, logprobs)

    def _sources(self, tail: Sequence[int]) -> Iterator[tuple[float, float, list[list[int]]]]:
        """Yield continuations of the text that ends with ``tail``, after the shares of their first and later tokens."""
        for length in range(1, min(_LONGEST_IN_CONVERSATION, len(tail)) + 1):
            found = self._index.continuations(tail[-length:], most=_MOST_OF_A_SUFFIX, length=_LONGEST_BRANCH)
            yield _FIRST_SHARE, _LATER_SHARE + _SHARE_OF_A_TOKEN * length, found
        yield 1.0, 1.0, self._from_datastore(tail)

    def _from_datastore(self, tail: Sequence[int]) -> list[list[int]]:
        """Return continuations of the longest suffixes that occur; those of long ones count again with each shorter."""
        found: list[list[int]] = []
        if self._datastore is None:
            return found
        for length in range(self._datastore.longest(tail), 0, -1):
            some = self._datastore.continuations(tail[-length:], most=_MOST_OF_A_SUFFIX, length=_LONGEST_BRANCH)
            cut = [list(takewhile(lambda token: token not in self._stop_tokens, one)) for one in some]
            found += [one for one in cut if one]
            if len(found) >= _ENOUGH:
                break
        return found


class _Candidate(NamedTuple):
    """A token that may follow a node of the tree, by one source.

    Attributes:
        cost: minus the log-probability of its path (nats).
        age: order in which candidates were found; of equals the first wins.
        continuations: those of its source that continue from here; the token is their ``depth``-th.
    """

    cost: float
    age: int
    parent: int
    token: int
    depth: int
    later_share: float
    continuations: list[list[int]]


class _MergedTree:
    """A tree of the likeliest candidates of several sources.

    Args:
        length: of the text that it follows.
    """

    def __init__(self, budget: Budget, coupling: GumbelCoupling, mask: GrammarMask, length: int) -> None:
        self._budget, self._coupling, self._mask, self._length = budget, coupling, mask, length
        self._waiting: list[_Candidate] = []
        self._ages = count()
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._children: defaultdict[int, dict[int, int]] = defaultdict(dict)  # of each node, by token

    def grown(self) -> DraftTree:
        """Return the tree, as large as the budget allows and as it pays."""
        while self._waiting and len(self._tokens) < self._budget.nodes:
            candidate = heapq.heappop(self._waiting)
            siblings = self._children[candidate.parent]
            if candidate.token not in siblings:
                if (siblings and not self._budget.branches) or not self._permitted(candidate):
                    continue
                if not self._pays(candidate):
                    break
                self._tokens.append(candidate.token)
                self._parents.append(candidate.parent)
                self._scores.append(-candidate.cost)
                siblings[candidate.token] = len(self._tokens)
            going_on = [one for one in candidate.continuations if len(one) > candidate.depth]
            node, later, cost = siblings[candidate.token], candidate.later_share, candidate.cost
            share = later * len(going_on) / len(candidate.continuations)
            self.offer(going_on, share, later, node, candidate.depth, cost)
        return DraftTree(tuple(self._tokens), tuple(self._parents), tuple(self._scores))

    def offer(
        self,
        continuations: list[list[int]],
        share: float,
        later_share: float,
        node: int = 0,
        depth: int = 0,
        cost: float = 0,
    ) -> None:
        """Make the next tokens of a source's continuations candidates.

        Args:
            share, later_share: shares of the next token and of each later one.
            node, depth, cost: the node that they follow, its depth, and minus the log-probability of its path (nats).
        """
        if not continuations or depth >= self._budget.depth:
            return
        followers: defaultdict[int, list[list[int]]] = defaultdict(list)
        for one in continuations:
            followers[one[depth]].append(one)
        shares = {token: share * len(some) / len(continuations) for token, some in followers.items()}
        candidates = [DraftToken(token, math.log(part)) for token, part in shares.items()]
        for chosen in self._coupling.ranked([candidates], self._length + depth)[0]:
            rest = depth + 1, later_share, followers[chosen.token]
            candidate = _Candidate(cost - chosen.logprob, next(self._ages), node, chosen.token, *rest)
            heapq.heappush(self._waiting, candidate)

    def _permitted(self, candidate: _Candidate) -> bool:
        """Whether the grammar allows a candidate."""
        if not self._mask.on:
            return True
        path = path_to(candidate.parent, self._tokens, self._parents)
        return bool(self._mask.left([DraftToken(candidate.token, 0.0)], path))

    def _pays(self, candidate: _Candidate) -> bool:
        budget, logprob = self._budget, -candidate.cost
        if not self._tokens and budget.levels:
            return True
        if budget.branches or candidate.depth <= budget.levels:
            return budget.sends(logprob)
        return worth_copying(budget, logprob)
