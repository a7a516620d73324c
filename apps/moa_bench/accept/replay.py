"""An engine that knows what its target answers: drafts are compared with that instead of being verified.

A target writes the same text whatever is drafted, for the same seed where it samples. So where its answers are known,
one forward over question and answer gives every memory row that a drafter will be sent, and a round costs no forward at
all. A drafter that is sent none costs no forward of the target whatever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moa_bench.accept.written import Answers
from moa_runtime.session.tree import accepted_path
from moa_server.engine.base import Engine, Outcome, Rows, StepRequest, joined
from moa_server.engine.blocking import CHUNK


@dataclass
class _Text:
    """A sequence: the conversation up to the end of its last answer, and its rows from the first one on."""

    tokens: list[int] = field(default_factory=list)
    rows: Rows | None = None


class ReplayEngine:
    """Takes the place of ``engine``, which it asks for memory rows. Implements :class:`moa_server.engine.base.Engine`.

    Args:
        answers: to every text that will be asked.
        has_rows: whether the drafter is sent any.
    """

    def __init__(self, engine: Engine, answers: Answers, *, has_rows: bool = True) -> None:
        self._engine, self._answers, self.has_rows = engine, answers, has_rows
        self.fingerprints, self.vocab_size = engine.fingerprints, engine.vocab_size
        self.stop_tokens, self.max_context = engine.stop_tokens, engine.max_context
        self.capabilities, self.cache_use = engine.capabilities, (0, 0)
        #: Verdicts given; each would be a forward of the target.
        self.forwards = 0
        self._texts: dict[int, _Text] = {}

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        text = self._texts.get(sequence, _Text()).tokens
        if not self.has_rows or list(prefix) == text[: len(prefix)]:
            return len(prefix)
        return self._engine.held(sequence, prefix)

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        return [await self._verify(request) for request in requests]

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._engine.release(sequence)

    def close(self) -> None:
        self._texts.clear()

    async def _verify(self, request: StepRequest) -> Outcome:
        text, prefix = self._texts.setdefault(request.sequence, _Text()), list(request.prefix)
        known = prefix == text.tokens[: len(prefix)]
        if request.sampling is None:
            if known or not self.has_rows:
                return Outcome(rows=self._rows(text, request, len(prefix)))
            [outcome] = await self._engine.step([request])
            return outcome
        self.forwards += 1
        if not known:
            text.tokens = [*prefix, *self._answers[tuple(prefix)]]
            text.rows = await self._all_rows(request.sequence, text.tokens) if self.has_rows else None
        # By node, the prefix first: how many of the text's tokens there are up to it, or None off the text.
        ends: list[int | None] = [len(prefix)]
        for token, parent in zip(request.draft, request.parents, strict=True):
            end = ends[parent]
            ends.append(end + 1 if end is not None and self._next(text, end) == token else None)
        # What the target would choose behind a wrong token decides nothing.
        choices = [self.stop_tokens[0] if end is None else self._next(text, end) for end in ends]
        path = accepted_path(request.draft, request.parents, choices)
        chosen = choices[path[-1] + 1] if path else choices[0]
        return Outcome(tuple(path), chosen, self._rows(text, request, len(prefix) + len(path)))

    async def _all_rows(self, sequence: int, tokens: Sequence[int]) -> Rows | None:
        """The memory rows of a whole text, piece by piece."""
        parts: list[Rows] = []
        for start in range(0, len(tokens), CHUNK):
            request = StepRequest(sequence, tokens[: start + CHUNK], rows_from=start)
            [outcome] = await self._engine.step([request])
            if outcome.rows is None:
                return None
            parts.append(outcome.rows)
        return joined(parts)

    def _next(self, text: _Text, end: int) -> int:
        """The token behind the first ``end``; behind the whole text, where nothing is decided either, a stop token."""
        return text.tokens[end] if end < len(text.tokens) else self.stop_tokens[0]

    @staticmethod
    def _rows(text: _Text, request: StepRequest, end: int) -> Rows | None:
        if text.rows is None or request.rows_from is None:
            return None
        start = request.rows_from
        return Rows(start, text.rows.keys[start:end], text.rows.values[start:end])
