"""Plain decoding: the target alone, token by token, the baseline of every comparison; and log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moa_runtime.session.events import AnswerSampling, Sampling
from moa_server.engine.base import Engine, Float32, new_sequence
from moa_server.engine.target_pass import Piece
from moa_server.scheduling.verify_job import Job

if TYPE_CHECKING:
    from moa_server.engine.engine import LocalEngine
    from moa_server.engine.target_pass import Hidden

#: Most prompt tokens in one step; bounds the memory of a step.
PREFILL_CHUNK = 512
#: Most tokens in one scoring forward; bounds the memory of the logits, ``SCORING_CHUNK * vocab_size`` numbers.
SCORING_CHUNK = 128


class BlockingEngine:
    """Runs jobs one after the other for callers without an event loop. An engine may have several of these."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()

    def run(self, job: Job) -> Job:
        """Do a job and return it; exceptions of the engine are raised here."""
        while not job.done:
            request = job.request(self.engine.held(job.sequence, job.prefix), PREFILL_CHUNK + job.draft_length)
            [outcome] = self._loop.run_until_complete(self.engine.step([request]))
            job.take(request, outcome)
        return job

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        self.engine.release(sequence)

    def close(self) -> None:
        """End the event loop; the engine stays."""
        self._loop.close()


class Token(NamedTuple):
    """A token, and the number of steps it took (more than one for a long prompt)."""

    token: int
    steps: int


class PlainDecoding:
    """One plain decoding, in a sequence of its own: the jobs to do, one after the other, until a stop token (the last
    token of the answer), ``max_new_tokens``, or the end of the context.

    Attributes:
        sequence: the engine's number; the caller releases it after the last job.
        finish: reason of the end once the text is complete: "stop", "length" or "context".
    """

    def __init__(
        self, engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
    ) -> None:
        self.sequence, self._stop_tokens = new_sequence(), engine.stop_tokens
        own = isinstance(sampling, AnswerSampling)
        self._sampling = sampling if own else AnswerSampling(**vars(sampling), answer_from=len(prefix))
        self._tokens, context = list(prefix), engine.max_context
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
        """Take the token of a finished job."""
        assert job.token is not None
        self._tokens.append(job.token)
        if job.token in self._stop_tokens:
            self._end, self.finish = 0, "stop"
        return Token(job.token, job.steps)


def decode(
    engine: Engine, prefix: Sequence[int], sampling: Sampling, max_new_tokens: int | None = None
) -> Iterator[Token]:
    """Decode in the caller's thread."""
    plain = PlainDecoding(engine, prefix, sampling, max_new_tokens)
    with contextlib.closing(BlockingEngine(engine)) as blocking:
        try:
            while (job := plain.next()) is not None:
                yield plain.take(blocking.run(job))
        finally:
            engine.release(plain.sequence)


def log_probabilities(engine: LocalEngine, prefix: Sequence[int], continuation: Sequence[int]) -> Float32:
    """The target's log-probability of each token of ``continuation``, given all tokens before it.

    Args:
        prefix: at least one token; with the continuation at most ``engine.max_context``.

    Returns:
        natural logarithms, float32 ``[len(continuation)]``.

    Raises:
        ValueError: an empty prefix, or more tokens than the context holds.
    """
    tokens = [*prefix, *continuation]
    if not prefix or len(tokens) > engine.max_context:
        raise ValueError(
            f"a text of {len(prefix)} and {len(continuation)} tokens cannot be scored: the prefix needs at least one, "
            f"and the context holds {engine.max_context}"
        )
    if not continuation:
        return np.empty(0, np.float32)
    scores: list[Float32] = []
    # The last token predicts nothing that is asked for; the last of the prefix predicts the first that is.
    for start, hidden in _hidden_states(engine, tokens[:-1]):
        first, stop = max(start, len(prefix) - 1), start + len(hidden)
        if first < stop:
            logits = np.stack(list(engine.target_pass.logits([hidden[first - start :]])))
            logits -= logits.max(axis=1, keepdims=True)
            chosen = logits[np.arange(stop - first), tokens[first + 1 : stop + 1]]
            scores.append(chosen - np.log(np.exp(logits).sum(axis=1)))
    return np.concatenate(scores)


def next_logits(engine: LocalEngine, text: Sequence[int]) -> Float32:
    """Return the target's logits ``[vocab_size]`` after a text of at least one token."""
    *_, (_, hidden) = _hidden_states(engine, text)
    return engine.target_pass.logits([hidden[-1:]])[0]


def _hidden_states(engine: LocalEngine, text: Sequence[int]) -> Iterator[tuple[int, Hidden]]:
    """The target's last hidden states of a text, chunk by chunk: position of the first one, and ``[n, hidden]``."""
    cache = engine.target_pass.cache_shape.new_cache(len(text))
    for start in range(0, len(text), SCORING_CHUNK):
        hidden, count = engine.target_pass.forward([Piece(cache, start, text[start : start + SCORING_CHUNK])])
        engine.forwards += count
        yield start, hidden
