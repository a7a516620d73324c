"""The clients of ``moa-bench server``: processes that ask one question after the other, window by window."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from moa_bench.questions import Prompt
from moa_bench.serving import Answer, AnswerSettings, ChatMode, Turn
from moa_bench.verifier import Verifier
from moa_runtime.bundle import Bundle
from moa_runtime.drafters.factory import backend_for, drafter_for
from moa_runtime.errors import MoaError
from moa_runtime.options import LoopSettings

#: Longer than any queue before the verifier.
_PATIENCE_S = 600.0
#: Between two looks for a first token, or for the end of the window; between two looks at a silent verifier.
_LOOK_EVERY_S, _ASK_EVERY_S = 0.05, 5.0


@dataclass(frozen=True)
class Window:
    """A command to work in one of :data:`moa_bench.server.MODES` until the end that follows it."""

    mode: str
    verifier: Verifier


@dataclass(frozen=True)
class ClientRecord:
    """One client's answers until the end of a window, finished or not, also those from before it began; and processor
    seconds of all its threads within it."""

    answers: list[Answer]
    cpu_s: float


# -- in the client's process -----------------------------------------------------------------------------


def run_client(
    connection: Connection, bundle_folder: Path, prompts: Sequence[Prompt], settings: AnswerSettings
) -> None:
    """Load the bundle, then send None. For each Window received, send None after the first token, receive the end of
    the window (seconds of :func:`time.perf_counter`), and send a ClientRecord after it. A MoaError may come in place of
    each of these, and is the last.

    Ends when the other end of ``connection`` is closed.
    """
    try:
        bundle = Bundle.open(bundle_folder)
        backend = backend_for(bundle, threads=settings.threads)
        connection.send(None)
        while True:
            window: Window = connection.recv()
            answers: list[Answer] = []
            # A client waits for its verdicts, however late. On a device of its own it would write on meanwhile; here
            # that would take processor time from the other clients.
            streams = window.mode == "stream"
            drafting = "server" if streams else window.mode
            loop = LoopSettings(late_after_s=_PATIENCE_S, prefill_late_after_s=_PATIENCE_S, drafting=drafting)
            new_drafter = (lambda turn: None) if streams else (lambda turn: drafter_for(bundle.manifest, backend))
            asking = _chat(window.verifier, prompts, ChatMode(bundle, new_drafter, settings, loop), answers)
            connection.send(asyncio.run(_window(asking, connection, answers)))
    except (EOFError, BrokenPipeError):
        return
    except MoaError as error:
        connection.send(MoaError(str(error), code=error.code))


async def _window(asking: Coroutine[None, None, None], connection: Connection, answers: list[Answer]) -> ClientRecord:
    task = asyncio.create_task(asking)

    async def work_on(seconds: float) -> None:
        ended, _ = await asyncio.wait({task}, timeout=seconds)
        for early in ended:
            early.result()  # it ends by raising only

    while not any(answer.bursts for answer in answers):
        if connection.poll():  # nothing is sent yet: the other end is closed
            raise EOFError
        await work_on(_LOOK_EVERY_S)
    connection.send(None)
    while not connection.poll():
        await work_on(_LOOK_EVERY_S)
    end: float = connection.recv()
    cpu_began = time.process_time()
    await work_on(max(0.0, end - time.perf_counter()))
    cpu_s = time.process_time() - cpu_began
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return ClientRecord([answer.until(end) for answer in answers if answer.sent <= end], cpu_s)


async def _chat(verifier: Verifier, prompts: Sequence[Prompt], mode: ChatMode, answers: list[Answer]) -> None:
    """Ask with the runtime's chat, each question in a conversation and on a connection of its own. Raises MoaError: the
    verifier refuses, or cannot be reached."""
    for prompt in itertools.cycle(prompts):
        async with mode.connect(verifier.endpoint, Turn(prompt.text, prompt.tokens, ())) as ask:
            answers.append(Answer())
            await ask(answers[-1])


# -- in the benchmark's process --------------------------------------------------------------------------


@contextlib.contextmanager
def open_fleet(
    clients: int, bundle_folder: Path, prompts: Sequence[Prompt], settings: AnswerSettings
) -> Iterator[Fleet]:
    """Start clients, loaded and idle. Each begins with another of the prompts, the same in every window. Raises
    MoaError: a client cannot load the bundle."""
    fleet = Fleet()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which processes inherit: Ctrl-C is for the parent alone
    try:
        for number in range(clients):
            first = number % len(prompts)
            fleet.start(bundle_folder, [*prompts[first:], *prompts[:first]], settings)
        signal.signal(signal.SIGINT, before)
        fleet.collect()  # every client is loaded
        yield fleet
    finally:
        signal.signal(signal.SIGINT, before)
        fleet.close()


class Fleet:
    """Client processes; see :func:`open_fleet`."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._busy: list[Connection] = []

    def start(self, *work: object) -> None:
        """Start one more client, busy with loading; ``work`` are the arguments of :func:`run_client`."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_client, args=(theirs, *work), daemon=True)
        process.start()
        theirs.close()  # while it is open here, the process could end unnoticed
        self.processes.append(process)
        self._connections.append(ours)
        self._busy.append(ours)

    def begin(self, clients: int, window: Window) -> None:
        """Set the first ``clients`` clients to work, and wait until each has a first token; the others stay idle.
        Raises MoaError as ``collect`` does, or if some have none for long; VerifierGoneError: the verifier has ended,
        which clients would wait out."""
        self._busy = self._connections[:clients]
        self._send(window)
        give_up = time.monotonic() + _PATIENCE_S
        while self._busy:
            if self._received(_ASK_EVERY_S):
                continue
            window.verifier.status()
            for number, process in enumerate(self.processes[:clients], 1):
                if not process.is_alive():
                    raise _gone(f"client {number}", process)
            if time.monotonic() > give_up:
                text = f"{len(self._busy)} of {clients} sessions had no token after {_PATIENCE_S:g} s"
                raise MoaError(text, code="timeout")
        self._busy = self._connections[:clients]

    def end_at(self, moment: float) -> None:
        """Tell clients at work when the window is over, in seconds of :func:`time.perf_counter`."""
        self._send(moment)

    def _send(self, message: Window | float) -> None:
        for connection in self._busy:
            with contextlib.suppress(BrokenPipeError):  # `collect` reports that it has ended
                connection.send(message)

    def wait_for_any(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a client at work to finish or fail; returns whether one has."""
        return bool(wait(self._busy, seconds))

    def collect(self) -> list[ClientRecord]:
        """Wait for a message of each client at work; returns the records among them in no particular order. Raises
        MoaError if a client failed, or its process has ended."""
        records = []
        while self._busy:
            records += self._received()
        return [record for record in records if record is not None]

    def _received(self, seconds: float | None = None) -> list[ClientRecord | None]:
        """Return the messages of clients that have finished within ``seconds``; these are not at work any more."""
        ready = wait(self._busy, seconds)
        messages = []
        for connection in [busy for busy in self._busy if busy in ready]:
            self._busy.remove(connection)
            number = self._connections.index(connection)
            messages.append(receive(connection, self.processes[number], f"client {number + 1}"))
        return messages

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()


def receive(connection: Connection, process: SpawnProcess, name: str) -> Any:
    """Return what ``process`` sends next. Raises MoaError if it sends one, or has ended."""
    try:
        reply = connection.recv()
    except (EOFError, ConnectionResetError):
        raise _gone(name, process) from None
    if isinstance(reply, MoaError):
        raise reply
    return reply


def _gone(name: str, process: SpawnProcess) -> MoaError:
    process.join()
    return MoaError(f"{name} ended unexpectedly, with exit status {process.exitcode}", code="client_gone")
