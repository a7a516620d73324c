"""What of a controller's budget a draft may use."""

from __future__ import annotations

from dataclasses import replace

from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.settings import Conditions
from moa_runtime.session.handshake import Limits

#: A text that may still change is drafted token by token, so that frames are never waited for.
ONE = Budget(nodes=1, levels=1)


def within(budget: Budget, limits: Limits, room: int | None, conditions: Conditions) -> Budget:
    """What verifier, answer and host allow of it.

    Args:
        room: tokens that the answer may still have, None without a limit.
    """
    return replace(
        budget,
        nodes=min(budget.nodes, limits.max_draft_tokens),
        levels=0 if conditions.low_power or conditions.metered else budget.levels,
        branches=budget.branches and limits.trees,
        depth=budget.depth if room is None else min(budget.depth, room),
    )


def behind(budget: Budget, tentative: int, logprob: float) -> Budget:
    """What is left of it behind so many tentative tokens, by the log-probability of all of them (nats)."""
    if not tentative:
        return budget
    pays = budget.continued([logprob])
    levels = max(0, budget.levels - tentative) if pays else 0
    return replace(budget, nodes=max(0, budget.nodes - tentative), levels=levels, tentative=tentative, logprob=logprob)
