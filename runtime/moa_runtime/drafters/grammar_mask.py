"""The grammar of an answer, as a drafter heeds it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from moa_runtime.drafters.base import DraftToken
from moa_runtime.grammar.answer_matcher import DRAFT_S
from moa_runtime.session.events import AnswerSampling, Sampling

#: If so few tokens are allowed, and a drafter names none of them, each of them is a candidate.
_FEW = 8


class GrammarMask:
    """What the grammar of an answer leaves of a drafter's candidates, by their paths; without a grammar, all of them.

    After :data:`~moa_runtime.grammar.answer_matcher.DRAFT_S` of the processor nothing is left, and the draft ends.

    Args:
        sampling: with the grammar's state if it is an :class:`~moa_runtime.session.events.AnswerSampling` that has one.
        prefix: the text that is drafted after.
    """

    def __init__(self, sampling: Sampling, prefix: Sequence[int]) -> None:
        own = sampling if isinstance(sampling, AnswerSampling) else None
        self._state = None if own is None else own.state
        self._answer = [] if own is None or own.state is None else list(prefix[own.answer_from :])
        self._left_s = DRAFT_S

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
        if self._left_s <= 0:
            return []
        with self._charged():
            tokens = [candidate.token for candidate in candidates]
            able, count = self._state.among([*self._answer, *path], tokens)
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
        if self._state is None or self._left_s <= 0:
            return []
        with self._charged():
            able = np.flatnonzero(self._state.mask([*self._answer, *path])).tolist()
        return [DraftToken(token, -math.log(len(able))) for token in able] if len(able) <= _FEW else []

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """Return the tokens that must follow a path of the draft, one after the other."""
        if self._state is None or self._left_s <= 0:
            return []
        with self._charged():
            return self._state.forced([*self._answer, *path])

    @contextlib.contextmanager
    def _charged(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._left_s -= time.thread_time() - began
