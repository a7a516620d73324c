"""Plain decoding: the target alone, token by token. What every other path is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moa_runtime.session.server import Sampling
from moa_server.blocking import BlockingEngine
from moa_server.engine import Engine, new_sequence
from moa_server.jobs import Job


class Token(NamedTuple):
    """One token the target chose, and the steps it took (more than one for a long prompt)."""

    token: int
    steps: int


class PlainDecoding:
    """One plain decoding: the jobs to do, one after the other, until a stop token (a token of the answer too),
    ``max_new_tokens``, or the end of the context.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: int,
        prefix: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int | None = None,
    ) -> None:
        self._sequence, self._sampling, self._tokens = sequence, sampling, list(prefix)
        self._stop_tokens = engine.stop_tokens
        context = engine.max_context
        self._end = context if max_new_tokens is None else min(context, len(prefix) + max_new_tokens)

    def next(self) -> Job | None:
        """The job that decides the next token; None when the text is complete."""
        return None if len(self._tokens) >= self._end else Job(self._sequence, self._tokens, self._sampling)

    def take(self, job: Job) -> Token:
        """Note what a job that is done has decided."""
        assert job.token is not None
        self._tokens.append(job.token)
        if job.token in self._stop_tokens:
            self._end = 0
        return Token(job.token, job.steps)


def decode(
    engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
) -> Iterator[Token]:
    """Decode in the caller's thread."""
    with contextlib.closing(BlockingEngine(engine)) as blocking:
        sequence = new_sequence()
        plain = PlainDecoding(engine, sequence, prefix, sampling, max_new_tokens)
        try:
            while (job := plain.next()) is not None:
                yield plain.take(blocking.run(job))
        finally:
            blocking.release(sequence)
