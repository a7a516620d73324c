"""The offline benchmark: cut the link in the middle of an answer, write on without the target, reconnect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moa_bench.conversation import Answer, Conversation, RefusedError
from moa_bench.inprocess import Device
from moa_bench.loopback import LoopbackVerifier
from moa_bench.offline.outage import Outage
from moa_bench.offline.tally import Tally, Text
from moa_bench.questions import Question
from moa_runtime.drafters.base import Budget
from moa_runtime.drafters.ngram_drafter import NgramDrafter
from moa_runtime.drafting.events import Pushed, RoundEnded
from moa_runtime.errors import MoaError
from moa_runtime.session.events import Sampling
from moa_runtime.session.handshake import Limits
from moa_server.engine.base import Engine
from moa_server.engine.baseline import decode

WRITERS = ("writer", "moa", "moa-unbounded", "ngram", "nothing")

#: The target's log-probabilities (nats, float32 ``[n]``) of n tokens that follow a prefix: ``score(prefix, tokens)``.
Score = Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]

_GREEDY = Sampling()
#: Tokens of each draft before the cut. What is committed there does not depend on it.
_DRAFT_LENGTH = 6


@dataclass(frozen=True)
class OfflineSettings:
    """Where the link is cut and how much is written then.

    Args:
        after: committed tokens of the answer before the cut.
        lengths: tokens written at most during the cut.

    Raises:
        MoaError: a number out of range.
    """

    after: int = 32
    lengths: tuple[int, ...] = (16, 32, 64, 128)

    def __post_init__(self) -> None:
        most = Limits().max_draft_tokens
        if self.after < 1:
            raise MoaError(f"the link can be cut after 1 token of the answer at the earliest, not {self.after}")
        if not self.lengths or not all(1 <= length <= most for length in self.lengths):
            lengths = ", ".join(map(str, self.lengths)) or "none"
            raise MoaError(f"the lengths to write offline must be 1 to {most} tokens, not {lengths}")


@dataclass(frozen=True)
class Written:
    """What one writer wrote during a cut, and how many tokens of it the target kept afterwards."""

    text: Text
    kept: int


@dataclass(frozen=True)
class Trial:
    """One question: the answer up to the cut, how the target goes on, and what each writer wrote instead."""

    question: str
    answer: Answer
    target: Text
    written: dict[str, Written]


@dataclass(frozen=True)
class SkippedQuestion:
    """A question whose answer could not be cut."""

    question_id: int | str
    reason: str


@dataclass
class Results:
    """What was measured so far, in whole questions.

    Attributes:
        writers: those of :data:`WRITERS` that there are.
        tallies: by writer and length.
        seconds: wall time, loading not included.
    """

    lengths: Sequence[int]
    writers: Sequence[str] = WRITERS
    questions: int = 0
    tallies: dict[str, dict[int, Tally]] = field(init=False)
    skipped: list[SkippedQuestion] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.tallies = {writer: {length: Tally() for length in self.lengths} for writer in self.writers}

    def add(self, trial: Trial) -> None:
        """Count one question at every length.

        A writer that stops earlier writes the first tokens of the same text, and the target keeps of these
        what it keeps of the whole: the leading tokens that equal its own.
        """
        self.questions += 1
        for writer, written in trial.written.items():
            for length, tally in self.tallies[writer].items():
                tally.add(written.text.first(length), min(written.kept, length), trial.target)


def measure(
    questions: Iterable[Question],
    device: Device,
    engine: Engine,
    score: Score,
    settings: OfflineSettings,
    results: Results,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> None:
    """Ask the first turn of every question and count what became of its answer into ``results``.

    Args:
        score: of the engine's target.
        on_trial: called with each question that was measured.

    Raises:
        RefusedError: bundle and engine do not belong together.
    """
    began = time.monotonic()
    try:
        for question in questions:
            outcome = _try(question, device, engine, score, settings)
            if isinstance(outcome, SkippedQuestion):
                results.skipped.append(outcome)
            else:
                results.add(outcome)
                on_trial(outcome)
    finally:
        results.seconds = time.monotonic() - began


def _try(
    question: Question, device: Device, engine: Engine, score: Score, settings: OfflineSettings
) -> Trial | SkippedQuestion:
    longest = max(settings.lengths)
    drafter = device.new_drafter()
    verifier = LoopbackVerifier(engine)
    try:
        shape = _UpTo(settings.after)
        conversation = Conversation(verifier, drafter, device.fingerprints, device.stop_tokens, shape)
        try:
            answer = _answer(conversation, device.tokenizer.continue_chat([], [], question.turns[0]), settings.after)
        except RefusedError as refusal:
            if refusal.code != "CONTEXT_FULL":
                raise
            return SkippedQuestion(question.id, str(refusal))
        if not conversation.answering:
            return SkippedQuestion(question.id, f"its answer ended with token {len(answer.tokens)}, before the cut")
        if len(conversation.committed) + longest > engine.max_context:
            return SkippedQuestion(question.id, f"the target's context has no room for {longest} tokens after the cut")
        outage = Outage(conversation.cut(), verifier)
        writer = device.new_writer
        texts = {} if writer is None else {"writer": outage.write(writer(), longest)}
        texts["moa"] = outage.write(drafter, longest)
        drafter.manners = None
        texts["moa-unbounded"] = outage.write(drafter, longest)
        texts |= {"ngram": outage.write(NgramDrafter(device.stop_tokens), longest), "nothing": []}
        kept = {writer: outage.reconnect(text) for writer, text in texts.items()}
    finally:
        verifier.close()
    cut = outage.committed
    own = [step.token for step in decode(engine, cut, _GREEDY, longest)]
    return Trial(
        question.turns[0],
        answer,
        Text(own, score(cut, own)),
        {writer: Written(Text(text, score(cut, text)), kept[writer]) for writer, text in texts.items()},
    )


def _answer(conversation: Conversation, question: Sequence[int], length: int) -> Answer:
    """The first ``length`` tokens of the answer, fewer if it ends before."""
    answer = conversation.ask(question, _GREEDY)
    while conversation.answering and len(answer.tokens) < length:
        conversation.go_on()
    return answer


class _UpTo:
    """Chains that let no more than ``length`` tokens be committed, one of the target's own in each round. Implements
    :class:`moa_runtime.drafting.draft_controllers.Controller`."""

    def __init__(self, length: int) -> None:
        self._left = length

    def budget(self) -> Budget:
        most = min(_DRAFT_LENGTH, self._left - 1)
        return Budget.chain(most, nodes=most)

    def ahead(self, drafted: int, probability: float) -> bool:
        return False

    @property
    def token_s(self) -> float:
        return 0.0

    def observe(self, outcome: RoundEnded | Pushed) -> None:
        self._left -= outcome.accepted + 1
