"""One conversation of device and verifier over the real protocol, both ends in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moa_bench.loopback import LoopbackVerifier
from moa_bench.pace import Clock
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.events import Draft, LoopEvent, RoundEnded
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.drafting.settings import LoopSettings
from moa_runtime.errors import MoaError
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Faulted, Origin, Sampling
from moa_runtime.session.handshake import Fingerprints
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.wire.moa.v1 import session_pb2 as wire


class RefusedError(MoaError):
    """The verifier answered with a fault; ``code`` as in :class:`~moa_runtime.session.events.Faulted`."""

    def __init__(self, fault: Faulted) -> None:
        super().__init__(fault.text)
        self.code = fault.code


@dataclass(frozen=True)
class Round:
    """One draft and its verdict, in tokens.

    Attributes:
        drafted: sent.
        depth: of them, on the longest path; as many as were sent where the draft is a chain.
        accepted: of them.
        committed: the bonus token included.
        draft_s: seconds that drafting took.
        seconds: of the whole round, on the conversation's clock.
        steps: of the model for this draft.
    """

    drafted: int
    depth: int
    accepted: int
    committed: int
    draft_s: float = 0.0
    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Answer:
    """The committed tokens of an answer, the one that ends the turn included, and where each came from."""

    tokens: list[int]
    origins: list[Origin]


class Conversation:
    """The runtime's drafting loop, where the device drafts, and a verifier that answers at once, so that nothing is
    written ahead; with a pace answers take time.

    Args:
        fingerprints: the bundle's.
        stop_tokens: ids that end the assistant's turn.
        controller: the shape of the drafts.
        clock: what the loop and its controller take for time.
        timeline: gets the spans ``draft`` and ``receive``.
        reads_rows: whether memory rows are sent.

    Raises:
        RefusedError: the engine serves another target, tokenizer or drafter; the message names both.
    """

    def __init__(
        self,
        verifier: LoopbackVerifier,
        drafter: Drafter,
        fingerprints: Fingerprints,
        stop_tokens: Sequence[int],
        controller: Controller,
        clock: Clock | None = None,
        timeline: Timeline = NO_TIMELINE,
        *,
        reads_rows: bool = True,
    ) -> None:
        self._verifier, self._timeline = verifier, timeline
        self._clock = clock or Clock()
        rows = wire.ROW_ENCODING_INT8 if reads_rows else wire.ROW_ENCODING_UNSPECIFIED
        self._session = ClientSession(fingerprints, stop_tokens=stop_tokens, row_encoding=rows)
        self._loop = DraftingLoop(self._session, drafter, controller, LoopSettings(drafting="device"))
        self._loop.listen(self._hear)
        self._answer = Answer([], [])
        self._on_round: Callable[[Round], None] = lambda outcome: None
        self._ended: RoundEnded | None = None
        self._refusal: Faulted | None = None
        self._loop.opened()
        self._exchange()

    @property
    def committed(self) -> list[int]:
        """The conversation's tokens so far."""
        return list(self._loop.committed)

    @property
    def answering(self) -> bool:
        """Whether the answer goes on."""
        return self._loop.answering

    def answer(
        self,
        question: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        on_round: Callable[[Round], None],
    ) -> Answer:
        """Let the target answer.

        Args:
            question: tokens of the user's turn, up to where the answer begins.
            on_round: called after each verdict on a draft; not after the question's own verdict, which
                brings the first token of the answer.

        Raises:
            RefusedError: the conversation does not fit the target's context (code ``CONTEXT_FULL``).
        """
        self._on_round = on_round
        answer = self.ask(question, sampling, max_new_tokens)
        while self.answering:
            self.go_on()
        return answer

    def ask(self, question: Sequence[int], sampling: Sampling, max_new_tokens: int = 0) -> Answer:
        """Ask, without drafting yet.

        Args:
            max_new_tokens: of the answer, 0 for no limit.

        Returns:
            the answer, which has its first token; :meth:`go_on` adds others.

        Raises:
            RefusedError: see :meth:`answer`.
        """
        self._answer = Answer([], [])
        self._loop.ask(len(self._loop.committed), question, sampling, max_new_tokens)
        self._exchange()
        return self._answer

    def go_on(self) -> None:
        """One draft and its verdict, which extends the answer. An answer must run.

        Raises:
            RefusedError: see :meth:`answer`.
        """
        draft_once(self._loop, self._clock, self._timeline)
        self._exchange()

    def cut(self) -> ClientSession:
        """Lose the link for good: the session is the caller's now, the conversation is over."""
        self._session.disconnected()
        return self._session

    def _exchange(self) -> None:
        exchange(self._loop, self._verifier, self._clock, self._timeline)
        if self._refusal is not None:
            raise RefusedError(self._refusal)

    def _hear(self, event: LoopEvent) -> None:
        if isinstance(event, RoundEnded):
            self._ended = event
        elif isinstance(event, Committed):
            self._answer.tokens.extend(event.tokens)
            self._answer.origins.extend(event.origins)
            ended = self._ended
            if ended is not None and not ended.supplied:
                self._on_round(
                    Round(
                        ended.drafted,
                        ended.depth,
                        ended.accepted,
                        len(event.tokens),
                        ended.draft_s,
                        ended.draft_s + ended.waited_s,
                        len(ended.steps),
                    )
                )
        elif isinstance(event, Faulted):
            self._refusal = event


def draft_once(loop: DraftingLoop, clock: Clock, timeline: Timeline = NO_TIMELINE) -> bool:
    """Draft if the loop says so; whether it did."""
    todo = loop.next(clock.now())
    if not isinstance(todo, Draft):
        return False
    began = clock.now()
    with timeline.measure("draft", "draft", position=len(todo.prefix), origin=todo.origin.value):
        tree = todo.by.propose(todo.prefix, todo.budget, todo.sampling)
    seconds = clock.drafted(tree, began)
    loop.drafted(todo, tree, seconds, clock.now())
    return True


def exchange(
    loop: DraftingLoop,
    verifier: LoopbackVerifier,
    clock: Clock | None = None,
    timeline: Timeline = NO_TIMELINE,
) -> None:
    """Send what is due and take what comes back; draft while it is on its way, where that takes time and the loop says
    so."""
    clock = clock or Clock()
    for frame in loop.frames_to_send(clock.now()):
        answers = verifier.receive(frame)
        comes = clock.answer_at(verifier.compute_s)
        while clock.now() < comes and draft_once(loop, clock, timeline):
            pass
        clock.wait_until(comes)
        for answer in answers:
            with timeline.measure("receive", "link", bytes=len(answer)):
                loop.received(answer, clock.now())
