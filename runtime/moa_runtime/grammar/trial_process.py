"""The process of :class:`moa_runtime.grammar.trial.GrammarTrial`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from pathlib import Path

from moa_runtime.errors import MoaError
from moa_runtime.grammar.compiler import STACK_BYTES, GrammarCompiler
from moa_runtime.session.events import Grammar

#: Processor time of a trial, in whole seconds as the system counts.
_CPU_S = 3


def main() -> int:
    """Compile a grammar for each line of stdin, and answer with a line."""
    file, *vocabulary = json.loads(sys.argv[1])
    compiler = GrammarCompiler(Path(file), *vocabulary)
    compiler.load()
    threading.stack_size(STACK_BYTES // 2)  # smaller than where it is compiled after a trial
    for line in sys.stdin:
        _set_limits()
        trying = threading.Thread(target=_try, args=(compiler, Grammar(*json.loads(line))))
        trying.start()
        trying.join()
        print("ended", flush=True)
    return 0


def _try(compiler: GrammarCompiler, grammar: Grammar) -> None:
    with contextlib.suppress(MoaError):
        compiler.compile(grammar)


def _set_limits() -> None:
    with contextlib.suppress(ImportError):  # Windows
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + _CPU_S, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
