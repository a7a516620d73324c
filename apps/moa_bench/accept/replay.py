"""An engine that knows what its target answers: drafts are compared with that instead of being verified.

A greedy target writes the same text whatever is drafted. So where its answers are known, one forward over question and
answer gives every memory row that a drafter will be sent, and a round costs no forward at all. A drafter that is sent
none costs no forward of the target whatever.
"""

from __future__ import annotations

from collections.abc import Sequence

from moa_bench.accept.written import Answers
from moa_runtime.session.server import Sampling
from moa_server.engine import Engine, Float32, TargetSequence


class ReplayEngine:
    """Takes the place of ``engine``, which it asks for memory rows. Implements :class:`moa_server.engine.Engine`.

    Args:
        answers: to every text that will be asked.
        has_rows: whether the drafter is sent any.
    """

    def __init__(self, engine: Engine, answers: Answers, *, has_rows: bool = True) -> None:
        self._engine, self._answers, self.has_rows = engine, answers, has_rows
        self.fingerprints, self.vocab_size = engine.fingerprints, engine.vocab_size
        self.stop_tokens, self.max_context = engine.stop_tokens, engine.max_context
        #: Verdicts given; each would be a forward of the target.
        self.forwards = 0

    def open(self) -> TargetSequence:
        """A new, empty sequence."""
        return _ReplaySequence(self, self._engine.open(), self._answers)


class _ReplaySequence:
    """See :class:`moa_server.engine.TargetSequence`; ``_text`` is the conversation up to the end of its last answer."""

    def __init__(self, engine: ReplayEngine, sequence: TargetSequence, answers: Answers) -> None:
        self._engine, self._sequence, self._answers = engine, sequence, answers
        self._text: list[int] = []

    def verify(
        self, prefix: Sequence[int], draft: Sequence[int], parents: Sequence[int], sampling: Sampling
    ) -> list[int]:
        self._engine.forwards += 1
        if list(prefix) != self._text[: len(prefix)]:
            self._text = [*prefix, *self._answers[tuple(prefix)]]
            if self._engine.has_rows:
                self._sequence.verify(self._text, (), (), sampling)
                self._sequence.keep(())
        # By node, the prefix first: how many of the text's tokens there are up to it, or None off the text.
        ends: list[int | None] = [len(prefix)]
        for token, parent in zip(draft, parents, strict=True):
            end = ends[parent]
            ends.append(end + 1 if end is not None and self._next(end) == token else None)
        # What the target would choose behind a wrong token decides nothing.
        return [self._engine.stop_tokens[0] if end is None else self._next(end) for end in ends]

    def _next(self, end: int) -> int:
        """The token behind the first ``end``; behind the whole text, where nothing is decided either, a stop token."""
        return self._text[end] if end < len(self._text) else self._engine.stop_tokens[0]

    def keep(self, path: Sequence[int]) -> None:
        pass  # all of the text has been kept

    def rows(self, positions: range) -> tuple[Float32, Float32] | None:
        return self._sequence.rows(positions) if self._engine.has_rows else None

    def close(self) -> None:
        self._text = []
        self._sequence.close()
