"""Random inputs of the vectors, the same in every year and version of Python."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moa_runtime.drafters.base import Budget, DraftToken, Prices
from moa_runtime.session.tree import DraftTree
from vectors import trace_json


class Draws:
    """Random numbers of one seed. Of Python's generator only ``random()`` is guaranteed not to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def share(self) -> float:
        return self._random()

    def whole(self, first: int, last: int) -> int:
        return first + int(self._random() * (last - first + 1))

    def flag(self) -> bool:
        return self._random() < 0.5

    def one_of(self, values: list[Any]) -> Any:
        return values[self.whole(0, len(values) - 1)]

    def several(self, least: int, most: int, one: Callable[[], Any]) -> list[Any]:
        return [one() for _ in range(self.whole(least, most))]


def some_candidates(draws: Draws) -> list[DraftToken]:
    """Some tokens with probabilities that add up to less than 1, best first."""
    left, found = 1.0, dict[int, float]()
    for _ in range(draws.whole(1, 5)):
        share = left * (0.2 + 0.7 * draws.share())
        found.setdefault(draws.whole(0, 6), share)
        left -= share
    ranked = sorted(found.items(), key=lambda item: -item[1])
    return [DraftToken(token, math.log(share)) for token, share in ranked]


def copying(draws: Draws, begun: list[int], count: int) -> list[int]:
    """Return a text that repeats parts of itself between new tokens."""
    text = list(begun)
    while len(text) < len(begun) + count:
        start = draws.whole(0, len(text))
        text += text[start : start + draws.whole(0, 8)] or [draws.whole(0, 6)]
    return text[: len(begun) + count]


def some_budget(draws: Draws) -> Budget:
    costs = Prices(0.2 * draws.share(), 0.05 * draws.share(), 0.1 * draws.share(), 0.5 + 0.5 * draws.share())
    free = Prices(follows=0.9)
    return Budget(
        draws.whole(1, 30),
        draws.whole(0, 6),
        draws.whole(1, 5),
        branches=True,
        depth=draws.one_of([3, 1 << 30]),
        prices=draws.one_of([costs, free]),
        logprob=-0.5 * draws.share(),
    )


def said(alternatives: list[list[DraftToken]]) -> list[list[list[float]]]:
    return [[[candidate.token, candidate.logprob] for candidate in candidates] for candidates in alternatives]


def tree_of(tree: DraftTree) -> dict[str, Any]:
    return trace_json.plain(asdict(tree))  # type: ignore[no-any-return]
