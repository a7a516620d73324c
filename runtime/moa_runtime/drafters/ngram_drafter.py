"""Drafting with an n-gram index alone, without a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moa_runtime.drafters.base import GREEDY, Budget, Float32
from moa_runtime.drafters.gumbel_coupling import Luck
from moa_runtime.drafters.mixture import NgramMixture, worth_copying
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree


class NgramDrafter:
    """A drafter without a model: all that it knows takes no step. Implements
    :class:`moa_runtime.drafters.base.Drafter`.

    It knows the conversation and what it wrote itself, nothing else, so during an outage it goes stale. Memory rows are
    of no use to it.

    Args:
        stop_tokens: ids that end a turn; they are not copied.
    """

    rows = 0
    needs_rows = False
    manners = None

    def __init__(self, stop_tokens: Collection[int] = ()) -> None:
        self._mixture = NgramMixture(stop_tokens)

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Memory rows are not used."""

    def truncate_rows(self, length: int) -> None:
        """Memory rows are not used."""

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """A chain of what followed before, which ends where the last token never occurred before. It is as long as the
        levels, where that pays, and longer, also without levels, while all of it is likely enough: see
        :func:`moa_runtime.drafters.mixture.worth_copying`. See :meth:`moa_runtime.drafters.base.Drafter.propose`."""
        text, logprobs, logprob, luck = list(prefix), list[float](), 0.0, Luck(sampling)
        while len(logprobs) < min(budget.nodes, budget.depth):
            self._mixture.confirm(text)
            copy = self._mixture.copy(text, luck)
            if copy is None:
                break
            logprob += copy.logprob
            levelled = len(logprobs) < budget.levels and (not logprobs or budget.sends(logprob))
            if not levelled and not worth_copying(budget, logprob):
                break
            text.append(copy.token)
            logprobs.append(copy.logprob)
        return DraftTree.chain(text[len(prefix) :], logprobs)
