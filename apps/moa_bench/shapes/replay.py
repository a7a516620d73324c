"""A recording put in the place of both models: the drafter's on the device, and the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moa_bench.accept.replay import ReplayEngine
from moa_bench.conversation import Conversation
from moa_bench.loopback import LoopbackVerifier
from moa_bench.pace import Clock, Pace
from moa_bench.shapes.recording import Paths, RecordedAnswer, Recording
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.mixture import NgramMixture
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.session.events import Sampling
from moa_runtime.tokens import common_length
from moa_server.engine.base import Capabilities, Outcome, Rows, StepRequest

_MAX_CONTEXT = 1 << 20
#: Of what was never asked.
_HOPELESS_NATS = -20.0


class RecordedBackend(Backend):
    """Says what was recorded. Where a path was not asked then, that from a later position of the answer, and where the
    path leaves the answer, nothing likely.

    Attributes:
        asked, unknown: queries, and those of them to which nothing is recorded.
    """

    kv_shape, max_positions = (1, 1), None

    def __init__(self, answer: RecordedAnswer) -> None:
        self.asked = self.unknown = 0
        self._paths = Paths()
        self.turn_to(answer)

    def turn_to(self, answer: RecordedAnswer) -> None:
        """What is asked from now on belongs to another answer."""
        self._answer, self._text = answer, (*answer.prompt, *answer.answer)

    @property
    def top_k(self) -> int:
        return self._answer.top_tokens.shape[1]

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        found = [self._query(position, path) for position, path in self._paths.of(inputs)]
        known = [-1 if query is None else query for query in found]
        self.asked += len(known)
        logprobs = self._answer.top_logprobs[known]  # a copy
        if None in found:
            self.unknown += found.count(None)
            logprobs[[query is None for query in found]] = _HOPELESS_NATS
        entries = np.zeros((len(inputs.tokens), 1, 1), np.float32)
        return StepResult(self._answer.top_tokens[known], logprobs, entries, entries)

    def _query(self, position: int, path: tuple[int, ...]) -> int | None:
        queries = self._answer.queries
        for right in range(len(path) + 1):
            query = queries.get((position + right, path[right:]))
            if query is not None:
                return query
            if path[right : right + 1] != self._text[position + right : position + right + 1]:
                break
        return None


class _Target:
    """What :class:`ReplayEngine` asks of an engine: rows, which say nothing here."""

    capabilities, forwards = Capabilities(), 0

    def __init__(self, recording: Recording) -> None:
        self.fingerprints, self.vocab_size = recording.fingerprints, recording.vocab_size
        self.stop_tokens, self.max_context = recording.stop_tokens, _MAX_CONTEXT
        self.cache_use = (0, 0)
        self._held: dict[int, Sequence[int]] = {}

    def held(self, sequence: int, prefix: Sequence[int]) -> int:
        return common_length(self._held.get(sequence, ()), prefix)

    async def step(self, requests: Sequence[StepRequest]) -> list[Outcome]:
        self._held.update((request.sequence, request.prefix) for request in requests)
        return [Outcome(rows=_rows(request)) for request in requests]

    def release(self, sequence: int) -> None:
        self._held.pop(sequence, None)

    def close(self) -> None:
        self._held.clear()


def _rows(request: StepRequest) -> Rows | None:
    if request.rows_from is None:
        return None
    rows = np.zeros((len(request.prefix) - request.rows_from, 1, 1), np.float32)
    return Rows(request.rows_from, rows, rows)


class Replay:
    """Both ends of one recorded answer, as often as one likes."""

    def __init__(self, recording: Recording, answer: RecordedAnswer) -> None:
        self.answer, self.backend = answer, RecordedBackend(answer)
        self.fingerprints, self.stop_tokens = recording.fingerprints, recording.stop_tokens
        self.target = _Target(recording)
        self._ngrams = recording.ngrams

    def drafter(self, backend: Backend | None = None) -> MoaDrafter:
        """A new one; one at a time on :attr:`backend`.

        Args:
            backend: in place of that.
        """
        asked, mixture = backend or self.backend, NgramMixture(self.stop_tokens) if self._ngrams else None
        return MoaDrafter(asked, max_context=_MAX_CONTEXT, stop_tokens=self.stop_tokens, mixture=mixture)

    def engine(self) -> ReplayEngine:
        """The target, which writes the answer."""
        return ReplayEngine(self.target, {tuple(self.answer.prompt): self.answer.answer})


def hold(replay: Replay, controller: Controller, pace: Pace) -> float:
    """Let the real loop write the answer.

    Returns:
        seconds at that pace, from the answer's first token on, which comes with the prompt's verdict.
    """
    clock, answer = Clock(pace), replay.answer
    verifier = LoopbackVerifier(replay.engine(), pace=pace)
    try:
        conversation = Conversation(
            verifier, replay.drafter(), replay.fingerprints, replay.stop_tokens, controller, clock
        )
        conversation.ask(answer.prompt, Sampling(), len(answer.answer))
        began = clock.now()
        while conversation.answering:
            conversation.go_on()
    finally:
        verifier.close()
    return clock.now() - began
