"""The program that keeps strangers' grammars away from a server: it forks a process for each of them.

It reads llguidance's tokenizer once, so a process of its own costs a grammar some milliseconds. The system ends a
process that takes too much processor time, stack or memory: llguidance has no limit of time, and holds Python's lock
while it consumes a token, which with an ambiguous grammar can take minutes. Started by
:class:`moa_runtime.grammar.processes.GrammarProcesses`; messages are pickled, because both ends are ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_runtime.grammar.answer_matcher import READ_S, AnswerMatcher
from moa_runtime.grammar.matcher import STACK_BYTES, GrammarError, compile_matcher, read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: Processor seconds in which a grammar compiles.
COMPILE_S = 3.0
#: Processor seconds that each call adds to what later ones may take, and the most that is saved for one: a mask takes
#: some 50 microseconds on the mean, and the first ones of a large grammar milliseconds.
CALL_S, BURST_S = 0.002, 0.25
#: Virtual memory of a process, bytes.
_MOST_BYTES = 4 << 30
#: Answers whose states are kept.
_STATES = 512


def main() -> int:
    """Fork a process for each socket that stdin, itself a socket, brings."""
    file, vocab_size, stop_tokens = json.loads(sys.argv[1])
    tokenizer = read_vocabulary(Path(file), vocab_size, stop_tokens)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes processes that ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may reach a whole group of processes
        signal.signal(number, signal.SIG_IGN)  # a verifier that ends still has answers under way
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=0) as control:
        control.sendall(b"r")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return 0
            if os.fork() == 0:
                control.close()
                serving = _GrammarServer(socket.socket(fileno=descriptors[0]), tokenizer, vocab_size, stop_tokens)
                threading.stack_size(STACK_BYTES)
                thread = threading.Thread(target=serving.run)
                thread.start()
                thread.join()
                os._exit(0)
            os.close(descriptors[0])


class _GrammarServer:
    """Compiles one grammar and answers calls of its states, until the other end closes the socket."""

    def __init__(
        self, connection: socket.socket, tokenizer: LLTokenizer, vocab_size: int, stop_tokens: list[int]
    ) -> None:
        self._file = connection.makefile("rwb")
        self._tokenizer, self._vocab_size, self._stop_tokens = tokenizer, vocab_size, stop_tokens
        self._states: OrderedDict[int, tuple[AnswerMatcher, list[int]]] = OrderedDict()  # each with its answer

    def run(self) -> None:
        with contextlib.suppress(ValueError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        try:
            grammar = pickle.load(self._file)
            _allow(COMPILE_S)
            try:
                self._matcher = compile_matcher(grammar, self._tokenizer, self._stop_tokens)
            except GrammarError as error:
                self._say(error)
                return
            self._say(None)
            saved = BURST_S
            while True:
                message = pickle.load(self._file)
                before, reads = time.process_time(), message[3] == "read"
                _allow(saved if not reads else BURST_S + READ_S)
                self._say(self._answered(*message))
                if not reads:  # whose time the server counts
                    saved = min(BURST_S, saved + CALL_S - (time.process_time() - before))
        except (EOFError, OSError):
            return

    def _answered(
        self, number: int, common: int, tail: list[int], method: str, arguments: tuple[Any, ...], ended: list[int]
    ) -> Any:
        """Return what a method of a state returns, for the answer of its last call up to ``common`` and ``tail``."""
        for each in ended:
            self._states.pop(each, None)
        if number not in self._states:
            self._states[number] = AnswerMatcher(self._matcher, self._vocab_size, self._stop_tokens), []
            if len(self._states) > _STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(number)
        state, answer = self._states[number]
        answer[common:] = tail
        return getattr(state, method)(answer, *arguments)

    def _say(self, value: Any) -> None:
        pickle.dump(value, self._file)
        self._file.flush()


def _allow(seconds: float) -> None:
    """Let the system end this process after so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
