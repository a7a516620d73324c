"""Plain decoding: the target alone, token by token. What every other path is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moa_runtime.session.sampling import Sampling
from moa_server.engine.base import Engine, new_sequence
from moa_server.engine.blocking import BlockingEngine
from moa_server.scheduling.verify_job import Job


class Token(NamedTuple):
    """One token the target chose, and the steps it took (more than one for a long prompt)."""

    token: int
    steps: int


class PlainDecoding:
    """One plain decoding, in a sequence of its own: the jobs to do, one after the other, until a stop token (a token of
    the answer too), ``max_new_tokens``, or the end of the context.

    Attributes:
        sequence: the engine's number; who runs the jobs releases it.
        finish: why the text ends where it does, once it is complete: "stop", "length" or "context".
    """

    def __init__(
        self, engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
    ) -> None:
        self.sequence = new_sequence()
        self._sampling, self._tokens = sampling, list(prefix)
        self._stop_tokens = engine.stop_tokens
        context = engine.max_context
        self._end = context if max_new_tokens is None else min(context, len(prefix) + max_new_tokens)
        self.finish = "context" if self._end == context else "length"

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self._tokens)

    def next(self) -> Job | None:
        """The job that decides the next token; None when the text is complete."""
        return None if len(self._tokens) >= self._end else Job(self.sequence, self._tokens, self._sampling)

    def take(self, job: Job) -> Token:
        """Note what a job that is done has decided."""
        assert job.token is not None
        self._tokens.append(job.token)
        if job.token in self._stop_tokens:
            self._end, self.finish = 0, "stop"
        return Token(job.token, job.steps)


def decode(
    engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
) -> Iterator[Token]:
    """Decode in the caller's thread."""
    with contextlib.closing(BlockingEngine(engine)) as blocking:
        plain = PlainDecoding(engine, prefix, sampling, max_new_tokens)
        try:
            while (job := plain.next()) is not None:
                yield plain.take(blocking.run(job))
        finally:
            blocking.release(plain.sequence)
