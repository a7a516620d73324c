"""A device and a verifier in one process that talk over the real protocol, without a network between them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moa_bench.simulated_clock import Clock, Pace
from moa_drafter.config import drafter_fingerprint
from moa_drafter.pretrained import checkpoint_of
from moa_runtime.backends.load import load_writer
from moa_runtime.bundle import Bundle, tokenizer_fingerprint
from moa_runtime.datastore import Datastore
from moa_runtime.drafters.base import Drafter
from moa_runtime.drafters.factory import backend_for, drafter_for, graphless_drafter, writer_for
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from moa_runtime.drafting.draft_controllers import Controller
from moa_runtime.drafting.events import Draft, LoopEvent, RoundEnded
from moa_runtime.drafting.loop import DraftingLoop
from moa_runtime.errors import MoaError
from moa_runtime.manifest import TOKENIZER_FILE, Fingerprints
from moa_runtime.options import DRAFTERS, DrafterName, LoopSettings
from moa_runtime.session.client import ClientSession
from moa_runtime.session.events import Committed, Faulted, Origin, Sampling
from moa_runtime.session.handshake import Limits, check_hello
from moa_runtime.session.memory_rows import encoding_of
from moa_runtime.session.server import RowsWork, ServerSession, Verify, parse_client_message
from moa_runtime.timeline import NO_TIMELINE, Timeline
from moa_runtime.tokenizer import ChatTokenizer
from moa_runtime.wire.moa.v1 import session_pb2 as wire
from moa_server.engine.base import Engine, new_sequence
from moa_server.engine.baseline import BlockingEngine
from moa_server.engine.dtypes import DTYPES
from moa_server.scheduling.step_drafts import Calibrations, StepDrafts, take_rows
from moa_server.scheduling.verify_job import Job

if TYPE_CHECKING:  # these bring torch
    from moa_drafter.drafter import Drafter as TorchDrafter
    from moa_drafter.target import Target
    from moa_server.engine.engine import LocalEngine


@dataclass(frozen=True)
class Device:
    """The parts of a device: a new drafter for each conversation, perhaps the bundle's offline writer."""

    fingerprints: Fingerprints
    tokenizer: ChatTokenizer
    new_drafter: Callable[[], Drafter | None]
    stop_tokens: tuple[int, ...]
    new_writer: Callable[[], MoaDrafter] | None = None
    row_encoding: int = wire.ROW_ENCODING_INT8


def device_of(
    bundle: Bundle, backend_name: str | None = None, *, ngrams: bool = True, datastore: Datastore | None = None
) -> Device:
    """Load a bundle's drafter and writer, by default on the first backend that it has a graph for. ``ngrams``,
    ``datastore``: see :func:`moa_runtime.drafters.factory.drafter_for`. Raises MoaError: the bundle's graph or
    tokenizer cannot be loaded."""
    backend, manifest = backend_for(bundle, backend=backend_name), bundle.manifest
    writer = load_writer(bundle, backend)
    return Device(
        manifest.fingerprints,
        ChatTokenizer.from_bundle(bundle),
        # The graph is shared; each conversation has caches of its own.
        lambda: drafter_for(manifest, backend, ngrams=ngrams, datastore=datastore),
        manifest.stop_tokens,
        None if writer is None else lambda: writer_for(manifest, writer),
        encoding_of(manifest.architecture) if manifest.has_rows else wire.ROW_ENCODING_UNSPECIFIED,
    )


def engine_of(args: argparse.Namespace) -> LocalEngine:
    """Load the engine that ``--model``, ``--drafter`` and ``--dtype`` name. Raises MoaError: a target or checkpoint
    that cannot be found or read, or that do not fit together."""
    # Imported late: --help should answer at once.
    from moa_drafter.target_source import DEFAULT_TARGET
    from moa_server.engine.load import load_local

    return load_local(args.model or DEFAULT_TARGET, checkpoint_of(args.drafter), dtype=args.dtype or DTYPES[0])


# -- drafters without a bundle ---------------------------------------------------------------------------


def without_model(given: str | Path) -> DrafterName | None:
    """Return the drafter that has no checkpoint, if ``given`` is its name."""
    return next((name for name, kind in DRAFTERS.items() if not kind.has_graph and name == given), None)


def checkpoint_pair(
    given: str | Path, target: Target, *, ngrams: bool = True, datastore: Path | None = None
) -> tuple[Device, LocalEngine]:
    """Make device and engine for a drafter's checkpoint of any architecture, in PyTorch and float32, or for a drafter
    :func:`without_model`.

    Args:
        given: see :func:`moa_drafter.pretrained.checkpoint_of`.
        datastore: a file of earlier texts to copy from.

    Raises:
        MoaError: a file that cannot be read, or a drafter that does not fit the target.
    """
    from moa_server.engine.torch_engine import torch_engine

    # As a bundle for the target would have it.
    file = target.folder / TOKENIZER_FILE
    tokenizer = ChatTokenizer(file, target.chat_template, target.special_tokens, target.stop_tokens)
    texts = None if datastore is None else Datastore.open(datastore, tokenizer_fingerprint(file))
    if (name := without_model(given)) is not None:
        engine = torch_engine(target)
        stops, rows = engine.stop_tokens, wire.ROW_ENCODING_UNSPECIFIED

        def new_copier() -> Drafter:
            return graphless_drafter(name, stops, texts)

        return Device(engine.fingerprints, tokenizer, new_copier, stops, row_encoding=rows), engine
    from moa_drafter.checkpoint import load_bound
    from moa_drafter.devices import input_major, lay_out_for_few_rows

    folder = checkpoint_of(given)
    drafter = load_bound(folder, target)
    if target.device.type == "cpu":
        lay_out_for_few_rows(drafter)
        if len(drafter.head) < len(target.head):  # a copy of some rows; a whole head is the target's own memory
            drafter.head = input_major(drafter.head)
    engine = torch_engine(target, drafter, drafter_fingerprint(folder))
    new_drafter = drafting(
        drafter, max_context=engine.max_context, stop_tokens=engine.stop_tokens, ngrams=ngrams, datastore=texts
    )
    rows = encoding_of(drafter.config.architecture)
    return Device(engine.fingerprints, tokenizer, new_drafter, target.stop_tokens, row_encoding=rows), engine


def drafting(
    drafter: TorchDrafter,
    *,
    max_context: int,
    stop_tokens: tuple[int, ...] = (),
    ngrams: bool = True,
    datastore: Datastore | None = None,
) -> Callable[[], MoaDrafter]:
    """Return a function that makes runtime drafters of a bound checkpoint; they share weights, not caches. ``ngrams``:
    mix with n-grams of the conversation and the datastore, see :class:`moa_runtime.drafters.ngram.NgramMixture`."""
    from moa_drafter.architectures.registry import torch_backend_of
    from moa_export.recipe import Recipe

    backend = torch_backend_of(drafter, top_k=Recipe().top_k)  # candidates for each node of a tree, as in a bundle
    return lambda: MoaDrafter(
        backend,
        max_context=max_context,
        stop_tokens=stop_tokens,
        mixture=NgramMixture(stop_tokens, datastore=datastore) if ngrams else None,
    )


# -- a conversation --------------------------------------------------------------------------------------


class LoopbackVerifier:
    """The verifier's end of one conversation in the caller's thread: frames in, frames out.

    Args:
        timeline: gets a span ``verify`` for each verdict, with the numbers of drafted, accepted and prefilled tokens.
        pace: of a simulated target; None for the time that the engine takes.

    Attributes:
        compute_s: seconds of the target for the last frame.
    """

    def __init__(self, engine: Engine, timeline: Timeline = NO_TIMELINE, pace: Pace | None = None) -> None:
        self.compute_s = 0.0
        self._pace = pace
        self._fingerprints = engine.fingerprints
        limits = Limits(max_context=engine.max_context, trees=engine.capabilities.trees)
        self._session = ServerSession(limits, engine.vocab_size, engine.stop_tokens)
        self._engine = BlockingEngine(engine)
        self._sequence, self._calibrations = new_sequence(), Calibrations()
        self._timeline = timeline

    def receive(self, frame: bytes) -> list[bytes]:
        """Handle one frame; returns the frames that answer it."""
        self.compute_s = 0.0
        return [message.SerializeToString() for message in self._handle(frame)]

    def close(self) -> None:
        """Free the engine's cache of this conversation."""
        self._engine.release(self._sequence)
        self._engine.close()

    def _handle(self, frame: bytes) -> list[wire.ServerMessage]:
        message = parse_client_message(frame)
        if isinstance(message, wire.ServerMessage):
            return [message]
        if message.WhichOneof("event") == "hello":
            refused = check_hello(message.hello, self._fingerprints)
            return [refused] if refused is not None else self._session.greet(message.hello, "loopback")
        work = self._session.receive(message)
        answers = [work] if isinstance(work, wire.ServerMessage) else []
        while work is not None and not isinstance(work, wire.ServerMessage):
            answers += self._do(work)
            work = self._session.next_work()
        while (rows := self._session.take_rows()) is not None:
            answers.append(rows)
        return answers

    def _do(self, work: Verify | RowsWork) -> list[wire.ServerMessage]:
        began, began_ns = time.perf_counter(), time.time_ns()
        if isinstance(work, RowsWork):
            take_rows(self._session, self._engine.run(Job(self._sequence, work.prefix, None, rows_from=work.start)))
            return []
        drafts = StepDrafts(self._session, self._sequence, self._calibrations, work)
        job = self._engine.run(drafts.job(None))
        counts = {"drafted": len(work.draft), "accepted": len(job.path), "prefill": work.supplied}
        self._timeline.span("verify", began_ns, time.time_ns(), "verifier", **counts)
        tokens = 1 + len(work.draft) + max(0, work.supplied - 1)
        self.compute_s = time.perf_counter() - began if self._pace is None else self._pace.compute_s(tokens)
        job.seconds = self.compute_s
        return [drafts.verdict(job)[0]]


class RefusedError(MoaError):
    """Raised when the verifier answers with a fault; ``code`` as in :class:`~moa_runtime.session.events.Faulted`."""

    def __init__(self, fault: Faulted) -> None:
        super().__init__(fault.text, code=fault.code)


@dataclass(frozen=True)
class Round:
    """One draft and its verdict.

    Attributes:
        drafted, accepted, committed: tokens that were sent, that the target chose too, and with the bonus token.
        depth: tokens on the draft's longest path; all of them for a chain.
        draft_s, seconds: of drafting, and of the whole round, on the conversation's clock.
        steps, queries: of the drafter's model for this draft, and the nodes that they continued.
    """

    drafted: int
    depth: int
    accepted: int
    committed: int
    draft_s: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    queries: int = 0


@dataclass(frozen=True)
class Answer:
    """The committed tokens of an answer, the one that ends the turn included, and the origin of each."""

    tokens: list[int]
    origins: list[Origin]


class Conversation:
    """The runtime's drafting loop on the device, and a verifier that answers at once, so that nothing is drafted
    ahead. With a pace, answers take time.

    Args:
        clock: the time of the loop and its controller.
        timeline: gets the spans ``draft`` and ``receive``.
        row_encoding: of the memory rows, see :func:`moa_runtime.session.memory_rows.encoding_of`; unspecified for none.

    Raises:
        RefusedError: the engine serves another target, tokenizer or drafter; the message names both.
    """

    def __init__(
        self,
        verifier: LoopbackVerifier,
        drafter: Drafter | None,
        fingerprints: Fingerprints,
        stop_tokens: Sequence[int],
        controller: Controller,
        clock: Clock | None = None,
        timeline: Timeline = NO_TIMELINE,
        *,
        row_encoding: int = wire.ROW_ENCODING_INT8,
    ) -> None:
        self._verifier, self._timeline = verifier, timeline
        self._clock = clock or Clock()
        self._session = ClientSession(fingerprints, stop_tokens=stop_tokens, row_encoding=row_encoding)
        self._loop = DraftingLoop(self._session, drafter, controller, LoopSettings(drafting="device"))
        self._loop.listen(self._hear)
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
        """Whether the answer is incomplete."""
        return self._loop.answering

    def answer(
        self, question: Sequence[int], sampling: Sampling, *, max_new_tokens: int, on_round: Callable[[Round], None]
    ) -> Answer:
        """Ask, and draft until the answer is complete; see :meth:`ask`."""
        answer = self.ask(question, sampling, max_new_tokens, on_round)
        while self.answering:
            self.next_round()
        return answer

    def ask(
        self,
        question: Sequence[int],
        sampling: Sampling,
        max_new_tokens: int = 0,
        on_round: Callable[[Round], None] = lambda outcome: None,
    ) -> Answer:
        """Ask, without drafting yet. Returns the answer with its first token; :meth:`next_round` adds others.

        Args:
            question: tokens of the user's turn, up to the beginning of the answer.
            max_new_tokens: of the answer, 0 for no limit.
            on_round: called after each verdict on a draft; the question's own verdict, which brings the first token of
                the answer, is none.

        Raises:
            RefusedError: the conversation does not fit the target's context (code ``CONTEXT_FULL``).
        """
        self._answer, self._on_round = Answer([], []), on_round
        self._loop.ask(len(self._loop.committed), question, sampling, max_new_tokens)
        self._exchange()
        return self._answer

    def next_round(self) -> None:
        """Send one draft and take its verdict, while an answer is incomplete. Raises RefusedError: see :meth:`ask`."""
        draft_once(self._loop, self._clock, self._timeline)
        self._exchange()

    def cut(self) -> ClientSession:
        """Lose the link for good: the conversation is over, and its session belongs to the caller."""
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
            if (ended := self._ended) is not None and not ended.supplied:
                seconds, tokens = ended.draft_s + ended.waited_s, len(event.tokens)
                counts = (ended.drafted, ended.depth, ended.accepted, tokens)
                self._on_round(Round(*counts, ended.draft_s, seconds, len(ended.steps), sum(ended.steps)))
        elif isinstance(event, Faulted):
            self._refusal = event


def draft_once(loop: DraftingLoop, clock: Clock, timeline: Timeline = NO_TIMELINE) -> bool:
    """Draft if the loop asks for it; returns whether it did."""
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
    loop: DraftingLoop, verifier: LoopbackVerifier, clock: Clock | None = None, timeline: Timeline = NO_TIMELINE
) -> None:
    """Send the loop's frames and take the answers; draft while these are under way, if the loop asks for it."""
    clock = clock or Clock()
    for frame in loop.frames_to_send(clock.now()):
        answers = verifier.receive(frame)
        arrives = clock.answer_at(verifier.compute_s)
        while clock.now() < arrives and draft_once(loop, clock, timeline):
            pass
        clock.wait_until(arrives)
        for answer in answers:
            with timeline.measure("receive", "link", bytes=len(answer)):
                loop.received(answer, arrives)
