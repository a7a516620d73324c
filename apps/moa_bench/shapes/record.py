"""Makes a recording: the real drafter, at every position of answers that the target wrote before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moa_bench.accept.replay import ReplayEngine
from moa_bench.conversation import Conversation
from moa_bench.loopback import LoopbackVerifier
from moa_bench.shapes.recording import Paths, RecordedAnswer
from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.backends.shared import SharedBackend
from moa_runtime.bundle import Manifest
from moa_runtime.drafters.base import GREEDY, Budget, Drafter, Float32
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.draft_controllers import FixedShape
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_server.engine.base import Engine

#: Between them they ask nearly everything that drafts of any price ask.
_SHAPES = (Budget.tree(62, 16, 10), Budget.chain(16))


def record(
    manifest: Manifest,
    backend: Backend,
    engine: Engine,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    ngrams: bool,
    on_position: Callable[[], None],
) -> RecordedAnswer:
    """What a bundle's drafter expects at every position of ``answer``, with the memory rows that it is sent there.

    Args:
        backend: the bundle's graph.
        engine: the target, which is asked for rows only.
        on_position: called for each position.
    """
    listening = _Listening(backend)
    recorder = _Recorder(drafter_for(manifest, listening, ngrams=ngrams), on_position)
    verifier = LoopbackVerifier(ReplayEngine(engine, {tuple(prompt): list(answer)}))
    nothing = FixedShape(Budget.chain(0))  # so that the answer comes token by token
    try:
        conversation = Conversation(verifier, recorder, manifest.fingerprints, manifest.stop_tokens, nothing)
        conversation.answer(prompt, Sampling(), max_new_tokens=len(answer), on_round=lambda outcome: None)
    finally:
        verifier.close()
    paths = [path for _, path in listening.heard]
    return RecordedAnswer(
        list(prompt),
        list(answer),
        np.array([position for position, _ in listening.heard], np.int32),
        np.array([len(path) for path in paths], np.int32),
        np.array([token for path in paths for token in path], np.int32),
        np.array([tokens for tokens, _ in listening.heard.values()], np.int32),
        np.array([logprobs for _, logprobs in listening.heard.values()], np.float32),
    )


class _Listening(SharedBackend):
    """A backend that notes what it was asked and what it said.

    Attributes:
        heard: candidates and log-probabilities by position and path.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._paths = Paths()
        self.heard: dict[tuple[int, tuple[int, ...]], tuple[list[int], list[float]]] = {}

    def step(self, inputs: StepInputs) -> StepResult:
        """See :meth:`moa_runtime.backends.base.Backend.step`."""
        result = super().step(inputs)
        said = zip(result.top_tokens.tolist(), result.top_logprobs.tolist(), strict=True)
        self.heard.update(zip(self._paths.of(inputs), said, strict=True))
        return result


class _Recorder:
    """Drafts in all shapes and proposes nothing. Implements :class:`moa_runtime.drafters.base.Drafter`."""

    manners = None

    def __init__(self, drafter: Drafter, on_position: Callable[[], None]) -> None:
        self._drafter, self._on_position = drafter, on_position

    @property
    def rows(self) -> int:
        return self._drafter.rows

    @property
    def needs_rows(self) -> bool:
        return self._drafter.needs_rows

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        self._drafter.add_rows(start, keys, values)

    def truncate_rows(self, length: int) -> None:
        self._drafter.truncate_rows(length)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        for shape in _SHAPES:
            self._drafter.propose(prefix, shape, sampling)
        self._on_position()
        return DraftTree()
