"""The clients of ``moa-bench server``: processes that ask one question after the other, window by window."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from moa_bench.questions import Prompt
from moa_bench.result import Burst
from moa_bench.verifier import stream_decode
from moa_runtime.backends.base import Backend
from moa_runtime.backends.load import load_backend
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.factory import drafter_for
from moa_runtime.drafting.draft_controllers import controller_for
from moa_runtime.errors import MoaError
from moa_runtime.events import AnswerFinished, AnswerUpdate
from moa_runtime.options import Drafting, DraftLength, LoopSettings
from moa_runtime.session.events import Sampling
from moa_runtime.transport import Endpoint

#: Longer than any queue before the verifier.
_PATIENCE_S = 600.0


@dataclass(frozen=True)
class Workload:
    """The questions of a client, and its settings.

    Attributes:
        draft_length: tokens of each draft, a chain, or a word for how they are chosen.
        max_new_tokens: tokens of an answer at most.
    """

    prompts: Sequence[Prompt]
    draft_length: DraftLength
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Window:
    """An order to work in one of :data:`moa_bench.server.MODES` for ``seconds`` from its receipt on.

    Attributes:
        http_url: of the verifier, see :attr:`moa_bench.verifier.Verifier.http_url`.
    """

    mode: str
    seconds: float
    endpoint: Endpoint
    http_url: str


@dataclass(frozen=True)
class AnswerRecord:
    """One answer, finished or not. Times in seconds since the client's window began."""

    asked_at: float
    bursts: list[Burst] = field(default_factory=list)


@dataclass(frozen=True)
class ClientRecord:
    """One client's window. ``cpu_s``: processor seconds of all its threads."""

    answers: list[AnswerRecord]
    cpu_s: float


class Recorder:
    """Records questions and tokens from now on; those after ``seconds`` are left out."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began, self._cpu_began = time.monotonic(), time.process_time()
        self._answers: list[AnswerRecord] = []

    def asked(self) -> None:
        """Record a question; the tokens that follow belong to its answer."""
        now = self._now()
        if now <= self._seconds:
            self._answers.append(AnswerRecord(now))

    def committed(self, tokens: int) -> None:
        """Record tokens that arrived together."""
        now = self._now()
        if now <= self._seconds:
            self._answers[-1].bursts.append(Burst(now, tokens))

    def record(self) -> ClientRecord:
        return ClientRecord(self._answers, time.process_time() - self._cpu_began)

    def _now(self) -> float:
        return time.monotonic() - self._began


# -- in the client's process -----------------------------------------------------------------------------


def run_client(connection: Connection, bundle_folder: Path, work: Workload) -> None:
    """Load the bundle, then send None, and a ClientRecord for each Window received, or a MoaError at last.

    Ends when the other end of ``connection`` is closed.
    """
    try:
        bundle = Bundle.open(bundle_folder)
        backend = load_backend(bundle, threads=1)
        connection.send(None)
        while True:
            window: Window = connection.recv()
            recorder = Recorder(window.seconds)
            if window.mode == "stream":
                answering = _stream(window, work, recorder)
            else:
                answering = _chat(bundle, backend, window, work, window.mode, recorder)
            connection.send(asyncio.run(_until_over(answering, window.seconds, recorder)))
    except (EOFError, BrokenPipeError):
        return
    except MoaError as error:
        connection.send(MoaError(str(error)))


async def _until_over(answering: Coroutine[None, None, None], seconds: float, recorder: Recorder) -> ClientRecord:
    task = asyncio.create_task(answering)
    ended, _ = await asyncio.wait({task}, timeout=seconds)
    for early in ended:
        early.result()  # it ends by raising only
    record = recorder.record()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return record


async def _chat(
    bundle: Bundle, backend: Backend, window: Window, work: Workload, drafting: Drafting, recorder: Recorder
) -> None:
    """Ask with the runtime's chat, each question in a conversation and on a connection of its own.

    A client waits for its verdicts, however late. On a device of its own it would write on meanwhile; here that would
    only take processor time from the other clients.

    Raises:
        MoaError: the verifier refuses, or cannot be reached.
    """
    for prompt in itertools.cycle(work.prompts):
        conversation = Chat(
            bundle,
            window.endpoint,
            drafter=drafter_for(bundle.manifest, backend),
            controller=controller_for(work.draft_length),
            settings=LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting),
        )
        try:
            await conversation.open()
            await _follow(conversation, prompt, work, recorder)
        finally:
            await conversation.close()


async def _follow(conversation: Chat, prompt: Prompt, work: Workload, recorder: Recorder) -> None:
    committed = 0
    recorder.asked()
    sending = conversation.send(prompt.text, max_new_tokens=work.max_new_tokens, sampling=work.sampling)
    async with aclosing(sending) as events:
        async for event in events:
            if not isinstance(event, AnswerUpdate | AnswerFinished):
                continue
            confirmed = sum(token.committed for token in event.tokens)
            if confirmed > committed:
                recorder.committed(confirmed - committed)
                committed = confirmed


async def _stream(window: Window, work: Workload, recorder: Recorder) -> None:
    """Let the target alone answer, token by token, all over one kept-alive connection.

    Raises:
        MoaError: the verifier refuses, or cannot be reached.
    """
    import httpx

    async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as client:
        for prompt in itertools.cycle(work.prompts):
            recorder.asked()
            decoding = stream_decode(
                client, window.http_url, window.endpoint.token, prompt.tokens, work.max_new_tokens, work.sampling
            )
            async with aclosing(decoding) as tokens:
                async for _ in tokens:
                    recorder.committed(1)


# -- in the benchmark's process --------------------------------------------------------------------------


class ClientGoneError(MoaError):
    """Raised when a client's process ended by itself."""


@contextlib.contextmanager
def open_fleet(clients: int, bundle_folder: Path, work: Workload) -> Iterator[Fleet]:
    """Start clients, loaded and idle. Each begins with another of the prompts, the same in every window.

    Raises:
        MoaError: a client cannot load the bundle.
    """
    fleet = Fleet()
    try:
        with _ignored_interrupts():  # which the processes inherit: Ctrl-C is for the parent alone
            for number in range(clients):
                first = number % len(work.prompts)
                prompts = (*work.prompts[first:], *work.prompts[:first])
                fleet.start(bundle_folder, replace(work, prompts=prompts))
        fleet.wait_until_ready()
        yield fleet
    finally:
        fleet.close()


class Fleet:
    """Client processes; see :func:`open_fleet`."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._busy: list[Connection] = []

    def start(self, bundle_folder: Path, work: Workload) -> None:
        """Start one more client."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_client, args=(theirs, bundle_folder, work), daemon=True)
        process.start()
        theirs.close()  # while it is open here, the process could end unnoticed
        self.processes.append(process)
        self._connections.append(ours)

    def wait_until_ready(self) -> None:
        """Wait until every client started is loaded; raises as :meth:`collect`."""
        self._busy = list(self._connections)
        for _ in self._replies():
            pass

    def begin(self, clients: int, window: Window) -> None:
        """Set the first ``clients`` clients to work; the others stay idle."""
        self._busy = self._connections[:clients]
        for connection in self._busy:
            with contextlib.suppress(BrokenPipeError):  # `collect` reports that it has ended
                connection.send(window)

    def wait_for_any(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a client at work to finish or fail; returns whether one has."""
        return bool(wait(self._busy, seconds))

    def collect(self) -> list[ClientRecord]:
        """Wait for all clients at work; returns their records in no particular order.

        Raises:
            MoaError: a client failed.
            ClientGoneError: a client's process has ended.
        """
        return [reply for reply in self._replies() if reply is not None]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def _replies(self) -> Iterator[ClientRecord | None]:
        """Receive one reply of every busy client, as they come."""
        while self._busy:
            ready = wait(self._busy)
            for connection in [busy for busy in self._busy if busy in ready]:
                self._busy.remove(connection)
                yield self._receive(connection)

    def _receive(self, connection: Connection) -> ClientRecord | None:
        try:
            reply: ClientRecord | MoaError | None = connection.recv()
        except (EOFError, ConnectionResetError):
            number = self._connections.index(connection)
            process = self.processes[number]
            process.join()
            text = f"client {number + 1} ended unexpectedly, with exit status {process.exitcode}"
            raise ClientGoneError(text) from None
        if isinstance(reply, MoaError):
            raise reply
        return reply


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
