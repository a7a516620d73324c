"""The clients as seen from the benchmark: started once, set to work together, ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from moa_bench.server.client import Failed, Ready, Window, run_client
from moa_bench.server.modes import Workload
from moa_bench.server.record import ClientRecord
from moa_runtime.errors import MoaError


class ClientGoneError(MoaError):
    """A client's process ended by itself."""


@contextlib.contextmanager
def open_fleet(clients: int, bundle_folder: Path, work: Workload) -> Iterator[Fleet]:
    """So many clients, loaded and idle. Each begins with another of the prompts, the same in every window.

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
        """Set the first so many clients to work; the others stay idle."""
        self._busy = self._connections[:clients]
        for connection in self._busy:
            with contextlib.suppress(BrokenPipeError):  # `collect` will say that it has ended
                connection.send(window)

    def wait_for_any(self, seconds: float) -> bool:
        """Wait for a client at work to finish or fail, at most so long; whether one has."""
        return bool(wait(self._busy, seconds))

    def collect(self) -> list[ClientRecord]:
        """Wait for all clients at work; what they noted, in no particular order.

        Raises:
            MoaError: what kept a client from its work.
            ClientGoneError: a client's process has ended.
        """
        return [reply for reply in self._replies() if isinstance(reply, ClientRecord)]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def _replies(self) -> Iterator[Ready | ClientRecord]:
        """One of every busy client, as they come."""
        while self._busy:
            ready = wait(self._busy)
            for connection in [busy for busy in self._busy if busy in ready]:
                self._busy.remove(connection)
                yield self._receive(connection)

    def _receive(self, connection: Connection) -> Ready | ClientRecord:
        try:
            reply: Ready | ClientRecord | Failed = connection.recv()
        except (EOFError, ConnectionResetError):
            number = self._connections.index(connection)
            process = self.processes[number]
            process.join()
            text = f"client {number + 1} ended unexpectedly, with exit status {process.exitcode}"
            raise ClientGoneError(text) from None
        if isinstance(reply, Failed):
            raise MoaError(reply.reason)
        return reply


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
