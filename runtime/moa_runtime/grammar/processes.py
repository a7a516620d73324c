"""Processes of strangers' grammars, seen from the server."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moa_runtime.cli_main import own_program
from moa_runtime.grammar.matcher import GrammarError
from moa_runtime.session.events import Grammar

#: Whether this system can fork processes for grammars; Windows cannot.
CAN_ISOLATE = hasattr(os, "fork") and hasattr(socket, "send_fds")
#: Grammars that have a process at once, each of some megabytes.
MOST_PROCESSES = 256


class GrammarProcess:
    """A compiled grammar in a process of its own, which ends when nothing refers to this object, or when it takes too
    long.

    Attributes:
        lock: of a call.
        released: numbers of states that are needed no longer; the next call tells the process.
        ended: whether the process has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file = connection, connection.makefile("rwb")
        self.lock, self.released, self.ended = threading.Lock(), deque[int](), False

    def ask(self, message: object) -> Any:
        """Send a message, and wait for the answer. Needs :attr:`lock` if another thread may ask, too.

        Raises:
            EOFError: the process has ended.
        """
        try:
            if self.ended:
                raise EOFError
            pickle.dump(message, self._file)
            self._file.flush()
            return pickle.load(self._file)
        except (EOFError, OSError, pickle.UnpicklingError) as error:  # the last of a message that was cut
            self.ended = True
            raise EOFError from error

    def end(self) -> None:
        """End the process, also while a thread waits for its answer."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        with contextlib.suppress(OSError), self._connection:
            self._file.close()


class GrammarProcesses:
    """Starts the processes of grammars, by ``fork_server.py``.

    Args:
        tokenizer_file, vocab_size, stop_tokens: see :class:`moa_runtime.grammar.compiler.GrammarCompiler`.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self._facts = json.dumps([str(tokenizer_file), vocab_size, list(stop_tokens)])
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._running: weakref.WeakSet[GrammarProcess] = weakref.WeakSet()
        self._lock, self._closed = threading.Lock(), False

    def load(self) -> None:
        """Start the fork server unless it runs, and wait until it has read the tokenizer."""
        with self._lock:
            self._load()

    def start(self, grammar: Grammar) -> GrammarProcess:
        """Compile a grammar in a new process.

        Raises:
            GrammarError: it does not compile, exceeds the limits, or too many others have a process.
        """
        here, there = socket.socketpair()
        with self._lock, there:
            if self._closed or sum(not each.ended for each in self._running) >= MOST_PROCESSES:
                text = f"{MOST_PROCESSES} other grammars are in use: try again later"
                raise GrammarError(text, code="too_many_grammars")
            process = GrammarProcess(here)
            try:
                self._fork(there)
            except OSError:
                self._end()  # it was killed
                with contextlib.suppress(OSError):  # the process then ends without an answer
                    self._fork(there)
            self._running.add(process)
        try:
            problem = process.ask(grammar)
        except EOFError as error:
            text = "the grammar takes too long to compile, or is nested too deeply"
            raise GrammarError(text, code="too_complex") from error
        if problem is not None:
            raise problem
        return process

    def close(self) -> None:
        """End all processes, also those that compile. From then on none starts."""
        self._closed = True
        for process in list(self._running):
            process.end()
        with self._lock:
            self._end()

    def _fork(self, there: socket.socket) -> None:
        socket.send_fds(self._load(), [b"f"], [there.fileno()])

    def _load(self) -> socket.socket:
        if self._control is None:
            here, there = socket.socketpair()
            with there:
                command = own_program("moa_runtime.grammar.fork_server", self._facts)
                null = subprocess.DEVNULL
                self._server = subprocess.Popen(command, stdin=there.fileno(), stdout=null, stderr=null)
            self._control = here
            here.recv(1)  # nothing if it ends at once, as without the tokenizer's file: then no grammar compiles
        return self._control

    def _end(self) -> None:
        if self._server is not None and self._control is not None:
            self._control.close()
            self._server.kill()
            self._server.wait()
        self._server = self._control = None
