"""The program that keeps strangers' grammars away from a server: it forks a process for each of them, and that one a
process for each of its answers.

It reads llguidance's tokenizer once, and a grammar compiles once, so a process of its own costs an answer some
milliseconds. The system ends a process that takes too much processor time, stack or memory: llguidance has no limit of
time, and holds Python's lock while it consumes a token, which with an ambiguous grammar can take minutes. Started by
:class:`moa_runtime.grammar.processes.GrammarProcesses`; messages are pickled, because both ends are ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.grammar.answer_matcher import DRAFT_S, READ_S, AnswerMatcher
from moa_runtime.grammar.matcher import GrammarError, compile_matcher, read_vocabulary, with_large_stack

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from moa_runtime.session.events import Grammar

#: Processor seconds in which a grammar compiles.
COMPILE_S = 3.0
#: Processor seconds that each call of a state adds to what later ones may take, and the most that is saved for one: a
#: mask takes some 50 microseconds on the mean, of a constant of a thousand words 2 milliseconds.
CALL_S, SAVED_S = 0.004, 0.1
#: Processor seconds of a call for which nothing is saved: timers are some milliseconds late, and 0 would be no limit.
_LEAST_S = 0.001
#: Processor seconds that a call may take beyond those after which it would return: a token takes at most a few
#: milliseconds, unless a grammar is hostile.
TOKEN_S = 0.02
#: Calls that return by themselves after these seconds.
_BOUNDED = {"read": READ_S, "allowed": DRAFT_S, "forced": DRAFT_S}
#: Virtual memory of a process, bytes.
_MOST_BYTES = 4 << 30
#: Of Linux's ``prctl``.
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Fork a process for each socket that stdin, itself a socket, brings."""
    file, vocab_size, stop_tokens = json.loads(sys.argv[1])
    tokenizer = read_vocabulary(Path(file), vocab_size, stop_tokens)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes processes that ended
    _adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may reach a whole group of processes
        signal.signal(number, signal.SIG_IGN)  # a verifier that ends still has answers under way
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    with socket.socket(fileno=0) as control:
        control.sendall(b"r")
        _fork_each(control, lambda connection: _serve_grammar(connection, tokenizer, vocab_size, stop_tokens))
    return 0


def _fork_each(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Fork a process that serves each socket that ``control`` brings, until the other end closes it. The first message
    on that socket says whether it could be forked."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            try:
                child = os.fork() == 0
            except OSError:
                with contextlib.suppress(OSError):
                    connection.sendall(pickle.dumps(False))
                continue
            if child:
                control.close()
                with contextlib.suppress(EOFError, OSError):  # the other end closed it
                    connection.sendall(pickle.dumps(True))
                    serve(connection)
                os._exit(0)


def _serve_grammar(
    connection: socket.socket, tokenizer: LLTokenizer, vocab_size: int, stop_tokens: Sequence[int]
) -> None:
    """Compile the grammar that comes, and fork a process for each of its answers."""
    with connection.makefile("rwb") as file:  # no answer's process keeps this socket open
        grammar: Grammar = pickle.load(file)
        _allow(COMPILE_S)
        try:
            matcher = compile_matcher(grammar, tokenizer, stop_tokens)
        except GrammarError as error:
            _say(file, error)
            return
        _allow(0)
        _say(file, None)

    def serve(answer: socket.socket) -> None:
        again = partial(compile_matcher, grammar, tokenizer, stop_tokens)
        _serve_answer(answer, AnswerMatcher(matcher, again, vocab_size, stop_tokens))

    _fork_each(connection, serve)


def _serve_answer(connection: socket.socket, state: AnswerMatcher) -> None:
    """Answer calls of a state: ``(common, tail, method, arguments)``, whose answer is that of the call before up to
    ``common``, and ``tail``."""
    file, answer = connection.makefile("rwb"), list[int]()

    def serve() -> None:
        saved = SAVED_S
        with contextlib.suppress(EOFError, OSError):  # the other end closed it
            while True:
                common, tail, method, arguments = pickle.load(file)
                answer[common:] = tail
                before, bounded = time.process_time(), _BOUNDED.get(method)
                _allow(max(saved, _LEAST_S) if bounded is None else bounded + TOKEN_S)
                _say(file, getattr(state, method)(answer, *arguments))
                if bounded is None:
                    saved = min(SAVED_S, saved + CALL_S - (time.process_time() - before))

    with_large_stack(serve)


def _adopt_orphans() -> None:
    """Have processes of answers whose grammar's has ended belong to this one. Else they belong to process 1, which in
    a container may be the verifier: it would remove none that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _say(file: BufferedIOBase, value: object) -> None:
    pickle.dump(value, file)
    file.flush()


def _allow(seconds: float) -> None:
    """Let the system end this process after so much processor time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
