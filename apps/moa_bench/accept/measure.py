"""The acceptance benchmark: how many tokens a round commits, on one machine, over the real protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moa_bench.accept.tally import Tally
from moa_bench.conversation import Answer, Conversation, RefusedError, Round
from moa_bench.inprocess import Device
from moa_bench.loopback import LoopbackVerifier
from moa_bench.pace import Clock, Pace
from moa_bench.questions import Question
from moa_runtime.draft_length import Adaptive
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.controllers import controller_for
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_server.engine.base import Engine


@dataclass(frozen=True)
class AcceptSettings:
    """What every answer is written with.

    Args:
        draft_length: tokens of each draft, a greedy chain, or levels of each tree; of drafts whose shape is
            chosen, how many are told apart at least.
        nodes: tokens of each tree; None drafts chains.
        width: nodes continued on each level of a tree.
        adaptive: how the shape of each draft is chosen, as in the runtime; None for always the same one.
        pace: of the machines that these are said to be; None for the time that things take on this one.
        max_new_tokens: tokens of an answer at most.

    Raises:
        MoaError: a number out of range.
    """

    draft_length: int = 6
    nodes: int | None = None
    width: int = Budget.tree().width
    max_new_tokens: int = 128
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    adaptive: Adaptive | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        most = Limits().max_draft_tokens
        if not 1 <= self.draft_length <= most:
            raise MoaError(f"the draft length must be 1 to {most} tokens, not {self.draft_length}")
        if self.nodes is not None and not self.draft_length <= self.nodes <= most:
            raise MoaError(
                f"a tree of {self.draft_length} levels has {self.draft_length} to {most} nodes, not {self.nodes}"
            )
        if self.nodes is not None and not 1 <= self.width <= self.nodes:
            raise MoaError(f"a level of a tree of {self.nodes} nodes continues 1 to {self.nodes}, not {self.width}")
        if self.max_new_tokens < 1:
            raise MoaError(f"an answer must be allowed at least 1 token, not {self.max_new_tokens}")
        if not 0 <= self.sampling.temperature < float("inf"):
            raise MoaError(f"the temperature must be 0 (greedy) or above, not {self.sampling.temperature}")
        if not 0 < self.sampling.top_p <= 1:
            raise MoaError(f"top-p must be above 0 and at most 1, not {self.sampling.top_p}")
        if not 0 <= self.sampling.seed < 1 << 64:
            raise MoaError(f"the seed must be a whole number of 64 bits, not {self.sampling.seed}")

    @property
    def timed(self) -> bool:
        """Whether the time of a token says something: drafts went by it, or it is that of a pace."""
        return self.adaptive == "auto" or self.pace is not None

    def controller(self) -> Controller:
        """Of one conversation."""
        if self.adaptive is not None:
            return controller_for(self.adaptive)
        if self.nodes is None:
            return FixedShape(Budget.chain(self.draft_length))
        return FixedShape(Budget.tree(self.nodes, self.draft_length, self.width))


@dataclass(frozen=True)
class SkippedTurn:
    """A turn that was not asked, nor the question's later ones; ``turn`` counts from 1."""

    question_id: int | str
    turn: int
    reason: str


@dataclass
class Results:
    """What was measured so far; whole rounds also of a question that is not finished.

    Attributes:
        tasks: in the order in which the questions named them.
        total: the rounds of all tasks.
        seconds: wall time, loading not included.
        draft_s: of it, drafting.
        target_passes: forwards of the target, those over questions included.
    """

    draft_length: int
    tasks: dict[str, Tally] = field(default_factory=dict)
    total: Tally = field(init=False)
    skipped: list[SkippedTurn] = field(default_factory=list)
    seconds: float = 0.0
    draft_s: float = 0.0
    target_passes: int = 0

    def __post_init__(self) -> None:
        self.total = Tally(self.draft_length)

    @property
    def tau(self) -> float | None:
        """The benchmark's figure: the plain mean of the tasks' taus, tasks without rounds left out."""
        taus = [tally.tau for tally in self.tasks.values() if tally.tau is not None]
        return sum(taus) / len(taus) if taus else None

    @property
    def draft_ms(self) -> float | None:
        """Mean time of a draft in milliseconds; None without rounds."""
        return 1000 * self.draft_s / self.total.rounds if self.total.rounds else None

    def tallies(self, task: str) -> tuple[Tally, Tally]:
        """The tallies that a round of ``task`` belongs into."""
        return self.tasks.setdefault(task, Tally(self.draft_length)), self.total


def measure(
    questions: Iterable[Question],
    device: Device,
    engine: Engine,
    settings: AcceptSettings,
    results: Results,
    on_answer: Callable[[str, Answer], None] = lambda turn, answer: None,
    timeline: Timeline = NO_TIMELINE,
) -> None:
    """Hold every conversation to its end and count its rounds into ``results``, also when interrupted.

    A turn that does not fit the target's context is skipped with the rest of its question, and listed.

    Args:
        on_answer: called with each user's turn and its answer.
        timeline: gets the spans of both ends.

    Raises:
        RefusedError: bundle and engine do not belong together.
    """
    began, passes = time.monotonic(), engine.forwards
    try:
        for question in questions:
            tallies = results.tallies(question.task)

            def count(outcome: Round, tallies: tuple[Tally, Tally] = tallies) -> None:
                results.draft_s += outcome.draft_s
                for tally in tallies:
                    tally.add(outcome, timed=settings.timed)

            skipped = _converse(question, device, engine, settings, count, on_answer, timeline)
            results.skipped += [skipped] if skipped else []
            for tally in tallies:
                tally.questions += 1
    finally:
        results.seconds = time.monotonic() - began
        results.target_passes = engine.forwards - passes


def _converse(
    question: Question,
    device: Device,
    engine: Engine,
    settings: AcceptSettings,
    count: Callable[[Round], None],
    on_answer: Callable[[str, Answer], None],
    timeline: Timeline,
) -> SkippedTurn | None:
    """Ask all turns of one question; returns the turn that did not fit, if any."""
    verifier = LoopbackVerifier(engine, timeline, settings.pace)
    conversation = Conversation(
        verifier,
        device.new_drafter(),
        device.fingerprints,
        device.stop_tokens,
        settings.controller(),
        Clock(settings.pace),
        timeline,
        reads_rows=device.reads_rows,
    )
    history: list[dict[str, str]] = []
    try:
        for number, text in enumerate(question.turns, 1):
            try:
                answer = conversation.answer(
                    device.tokenizer.continue_chat(conversation.committed, history, text),
                    settings.sampling,
                    max_new_tokens=settings.max_new_tokens,
                    on_round=count,
                )
            except RefusedError as refusal:
                if refusal.code != "CONTEXT_FULL":
                    raise
                return SkippedTurn(question.id, number, str(refusal))
            on_answer(text, answer)
            history += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": device.tokenizer.decode(answer.tokens)},
            ]
    finally:
        verifier.close()
    return None
