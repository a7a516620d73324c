"""The grammar of an answer, as a drafter heeds it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moa_runtime.drafters.base import DraftToken
from moa_runtime.session.events import AnswerSampling, Sampling

#: If so few tokens are allowed, and a drafter names none of them, each of them is a candidate.
_FEW = 8


class GrammarMask:
    """What the grammar of an answer leaves of a drafter's candidates, by their paths; without a grammar, all of them.

    Args:
        sampling: with the grammar's state if it is an :class:`~moa_runtime.session.events.AnswerSampling` that has one.
        prefix: the text that is drafted after.
    """

    def __init__(self, sampling: Sampling, prefix: Sequence[int]) -> None:
        own = sampling if isinstance(sampling, AnswerSampling) else None
        self._state = None if own is None else own.state
        self._answer = [] if own is None or own.state is None else list(prefix[own.answer_from :])

    @property
    def on(self) -> bool:
        """Whether there is a grammar."""
        return self._state is not None

    def left(self, candidates: list[DraftToken], path: Sequence[int], *, best: bool = False) -> list[DraftToken]:
        """Return the candidates that may follow a path of the draft. Their probabilities grow, because the forbidden
        tokens are not the target's choice.

        Args:
            best: whether all other tokens are less likely than each candidate. If few tokens are allowed, and none of
                them is a candidate, each of them becomes one.
        """
        if self._state is None:
            return candidates
        answer = [*self._answer, *path]
        able, count = self._state.among(answer, [candidate.token for candidate in candidates])
        kept = [candidate for candidate, allowed in zip(candidates, able, strict=True) if allowed]
        if not kept:
            return self.few(path) if best and count <= _FEW else []
        if len(kept) == len(candidates):
            return kept
        chances = [math.exp(candidate.logprob) for candidate in candidates]
        rest = max(0.0, 1.0 - sum(chances))
        if best:
            rest = min(rest, (count - len(kept)) * min(chances))
        whole = math.log(sum(math.exp(candidate.logprob) for candidate in kept) + rest or 1.0)
        return [DraftToken(candidate.token, min(0.0, candidate.logprob - whole)) for candidate in kept]

    def few(self, path: Sequence[int] = ()) -> list[DraftToken]:
        """Return the tokens that may follow a path of the draft, as if all had the same probability; none if they are
        many."""
        if self._state is None:
            return []
        able = np.flatnonzero(self._state.mask([*self._answer, *path])).tolist()
        return [DraftToken(token, -math.log(len(able))) for token in able] if len(able) <= _FEW else []

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Return the tokens that must follow a path of the draft, one after the other."""
        return [] if self._state is None else self._state.forced([*self._answer, *path])
