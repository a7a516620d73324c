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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moa_runtime.cli_main import own_program
from moa_runtime.grammar.matcher import TOO_MANY, GrammarError
from moa_runtime.session.events import Grammar

#: Whether this system can fork processes for grammars; Windows cannot.
CAN_ISOLATE = hasattr(os, "fork") and hasattr(socket, "send_fds")
#: Compiled grammars that have a process at once, each of some megabytes.
MOST_GRAMMARS = 256


class GrammarProcess:
    """The process of a compiled grammar, or of one of its answers. It ends when nothing refers to this object.

    Attributes:
        ended: whether the process is known to have ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._file = connection, connection.makefile("rwb")
        self.ended = False

    def ask(self, message: object) -> Any:
        """Send a message, and wait for the answer; one thread at a time.

        Raises:
            EOFError: the process has ended.
        """
        if self.ended:
            raise EOFError
        try:
            pickle.dump(message, self._file)
            self._file.flush()
        except OSError as error:
            self.ended = True
            raise EOFError from error
        return self._hear()

    def _hear(self) -> Any:
        try:
            return pickle.load(self._file)
        except (EOFError, OSError, pickle.UnpicklingError) as error:  # the last of a message that was cut
            self.ended = True
            raise EOFError from error

    def fork(self) -> GrammarProcess:
        """Return a new process for an answer of this grammar.

        Raises:
            GrammarError: this process has ended, or the system gives no process or open file.
        """
        try:
            here, there = socket.socketpair()
            process = GrammarProcess(here)
            with there:
                socket.send_fds(self._connection, [b"f"], [there.fileno()])
            if not process._hear():
                raise BlockingIOError
        except (EOFError, OSError) as error:
            self.ended |= isinstance(error, EOFError | ConnectionError)
            raise GrammarError("no process can be started for a grammar: try again later", code=TOO_MANY) from error
        return process

    def end(self) -> None:
        """End the process, also while a thread waits for its answer."""
        self.ended = True
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
        self._control: GrammarProcess | None = None
        self._running: weakref.WeakSet[GrammarProcess] = weakref.WeakSet()
        self._lock, self._closed = threading.Lock(), False

    def load(self) -> None:
        """Start the fork server unless it runs, and wait until it has read the tokenizer."""
        with self._lock:
            self._load()

    def start(self, grammar: Grammar) -> GrammarProcess:
        """Compile a grammar in a new process.

        Raises:
            GrammarError: it does not compile, exceeds the limits, or (:data:`~moa_runtime.grammar.matcher.TOO_MANY`)
                too many others have a process.
        """
        process = self._fork()
        try:
            problem = process.ask(grammar)
        except EOFError as error:
            text = "the grammar takes too long to compile, or is nested too deeply"
            raise GrammarError(text, code="too_complex") from error
        if problem is not None:
            process.end()
            raise problem
        return process

    def close(self) -> None:
        """End all processes, also those that compile. From then on none starts."""
        self._closed = True
        if (server := self._server) is not None:
            server.kill()  # also while it reads the tokenizer
        with self._lock:
            for process in self._running:
                process.end()
            self._end()

    def _fork(self) -> GrammarProcess:
        with self._lock:
            if sum(not each.ended for each in self._running) >= MOST_GRAMMARS:
                raise GrammarError(f"{MOST_GRAMMARS} other grammars are in use: try again later", code=TOO_MANY)
            control = self._load()
            try:
                process = control.fork()
            except GrammarError:
                if not control.ended:
                    raise
                process = self._load().fork()  # again: it was killed
            self._running.add(process)
        return process

    def _load(self) -> GrammarProcess:
        if self._closed:
            raise GrammarError("no grammar compiles any more: the server ends", code=TOO_MANY)
        if self._server is not None and (
            self._control is None or self._control.ended or self._server.poll() is not None
        ):
            self._end()
        if self._control is None:
            try:
                here, there = socket.socketpair()
                with there:
                    command = own_program("moa_runtime.grammar.fork_server", self._facts)
                    # One thread: more are of no use there, and forking is simpler.
                    self._server = subprocess.Popen(
                        command,
                        stdin=there.fileno(),
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                    )
            except OSError as error:
                text = f"no process can be started for a grammar ({error}): try again later"
                raise GrammarError(text, code=TOO_MANY) from error
            self._control = GrammarProcess(here)
            here.recv(1)  # nothing if it ends at once, as without the tokenizer's file: then no grammar compiles
        return self._control

    def _end(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._server = self._control = None
