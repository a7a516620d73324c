"""Rounds of a device, a link and a target that are only told by their times, with a drafter that says how often it is
right."""

from __future__ import annotations

import math
import random

from moa_bench.simulated_clock import Pace
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.tree_growth import GrowingTree
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.events import RoundEnded
from moa_runtime.session.tree import DraftTree, walk

#: Probabilities of the candidates, best first, whatever they follow.
Shares = tuple[float, ...]


def draft_in(budget: Budget, shares: Shares) -> DraftTree:
    """What a drafter with these candidates proposes; a token is its rank."""
    if not budget.levels:
        return DraftTree()
    candidates = [DraftToken(rank, math.log(share)) for rank, share in enumerate(shares)]
    tree = GrowingTree(budget)
    tree.add_level([candidates])
    while tree.depth < budget.levels:
        paths, _ = tree.expand()
        if not paths:
            break
        tree.add_level([candidates] * len(paths))
    return tree.best()


def prompt_of(tokens: int, pace: Pace) -> RoundEnded:
    """A prompt and its verdict."""
    compute_s = pace.compute_s(tokens)
    return RoundEnded(tokens, 0, 0, 0, (), 0.0, pace.round_trip_s + compute_s, compute_s)


def round_of(tree: DraftTree, pace: Pace, shares: Shares, rng: random.Random, reading_s: float = 0.0) -> RoundEnded:
    """A draft and its verdict; tokens are right as often as the drafter says.

    Args:
        reading_s: what the draft's first step took longer, because it was over a prompt as well.
    """
    ranks, weights = range(len(shares) + 1), [*shares, 1 - sum(shares)]
    path, _ = walk(tree.tokens, tree.parents, lambda node: rng.choices(ranks, weights)[0])
    compute_s = pace.compute_s(1 + len(tree.tokens))
    draft_s = pace.draft_s(tree) + (reading_s if tree.steps else 0.0)
    return RoundEnded(
        0, len(tree.tokens), tree.depth, len(path), tree.steps, draft_s, pace.round_trip_s + compute_s, compute_s
    )


def hold(
    controller: Controller, pace: Pace, shares: Shares, rounds: int = 200, *, prompt: int = 60, reading_s: float = 0.0
) -> list[RoundEnded]:
    """The rounds of an answer.

    Args:
        prompt: tokens of the question before it, 0 for none.
    """
    if prompt:
        controller.observe(prompt_of(prompt, pace))
    rng, ended = random.Random(1), list[RoundEnded]()
    for _ in range(rounds):
        ended.append(round_of(draft_in(controller.budget(), shares), pace, shares, rng, reading_s))
        reading_s = 0.0 if ended[-1].steps else reading_s
        controller.observe(ended[-1])
    return ended


def rate_of(ended: list[RoundEnded]) -> float:
    """Tokens a second."""
    return sum(one.accepted + 1 for one in ended) / sum(one.draft_s + one.waited_s for one in ended)


def expected_rate(tree: DraftTree, pace: Pace) -> float:
    """Tokens a second, if every draft is ``tree``."""
    seconds = pace.draft_s(tree) + pace.round_trip_s + pace.compute_s(1 + len(tree.tokens))
    return (1 + sum(math.exp(score) for score in tree.scores)) / seconds
