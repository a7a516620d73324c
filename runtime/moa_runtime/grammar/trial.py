"""A trial of grammars in a process of its own (``trial_process.py``): llguidance's compiler has no limit of time or
stack."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from moa_runtime.cli_main import own_program
from moa_runtime.session.events import Grammar

#: Seconds of a trial on Windows, which has no limit of processor time.
_WALL_S = 60.0


class GrammarTrial:
    """Compiles grammars in a process that the system ends if that takes too long or too much stack.

    The process starts with the first grammar, and again after one that ended it.

    Args:
        tokenizer_file, vocab_size, stop_tokens: see :class:`moa_runtime.grammar.compiler.GrammarCompiler`.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self._facts = json.dumps([str(tokenizer_file), vocab_size, list(stop_tokens)])
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._closed = threading.Lock(), False

    def ends(self, grammar: Grammar) -> bool:
        """Return whether a compilation of this grammar comes to an end, with or without success."""
        with self._lock:
            return self._ends(grammar)

    def close(self) -> None:
        """End the process, also while a thread waits for it. From then on, no grammar is said to end."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ends(self, grammar: Grammar) -> bool:
        if self._process is None:
            command = own_program("moa_runtime.grammar.trial_process", self._facts)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        if self._closed:
            process.kill()
        timer = threading.Timer(_WALL_S, process.kill)
        if sys.platform == "win32":  # elsewhere a busy machine, or one that sleeps, changes nothing
            timer.start()
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps([grammar.kind, grammar.text]) + "\n")
            process.stdin.flush()
        ended = bool(process.stdout.readline())
        timer.cancel()
        if not ended:
            self._end()
        return ended

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its pipes and waits
                self._process = None
