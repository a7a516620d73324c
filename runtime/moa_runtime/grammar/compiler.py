"""Compiles the grammars of answers, within limits, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.bundle import Bundle
from moa_runtime.grammar.answer_matcher import AnswerMatcher
from moa_runtime.grammar.isolated_matcher import IsolatedMatcher
from moa_runtime.grammar.matcher import (
    TOO_MANY,
    GrammarError,
    compile_matcher,
    has_llguidance,
    read_vocabulary,
)
from moa_runtime.grammar.processes import CAN_ISOLATE, GrammarProcess, GrammarProcesses
from moa_runtime.session.events import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars, and reasons why one does not compile, that are kept.
MOST_KEPT = 32
#: Turns of :data:`moa_runtime.grammar.answer_matcher.READ_S` in which an answer so far is read.
_TURNS = 60


class GrammarCompiler:
    """Compiles grammars for a target. Limits are counters and processor time: the result does not depend on the load.

    Args:
        tokenizer_file: the target's ``tokenizer.json``, which is read when the first grammar comes.
        vocab_size, stop_tokens: of the target.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self._facts = tokenizer_file, vocab_size, list(stop_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher | GrammarProcess | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._processes: GrammarProcesses | None = None

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> GrammarCompiler | None:
        """Return that of a bundle's target, the same object for each call; None without the extra ``grammar``."""
        manifest = bundle.manifest
        facts = manifest.fingerprints.tokenizer, manifest.vocab_size, manifest.stop_tokens
        return _of_bundle(bundle.tokenizer_path, *facts) if has_llguidance() else None

    def distrust(self) -> None:
        """From now on, give each grammar a process of its own, if the system can: it is a stranger's."""
        self._processes = GrammarProcesses(*self._facts) if CAN_ISOLATE else None

    def load(self) -> None:
        """Have llguidance's tokenizer read, unless it is. A server does so before it serves: it takes half a second."""
        if self._processes is not None:
            self._processes.load()
        elif self._tokenizer is None:
            self._tokenizer = read_vocabulary(*self._facts)

    def knows(self, grammar: Grammar) -> bool:
        """Return whether a grammar is compiled, or is known not to compile."""
        return self._known(grammar) is not None

    async def compiled(self, grammar: Grammar, answer: Sequence[int] = ()) -> AnswerMatcher | IsolatedMatcher:
        """Do as :meth:`compile` does, in the compiler's thread, where the state also reads the tokens of an answer so
        far, in turns with other grammars: an ambiguous one takes milliseconds for each. One that is known waits for no
        other before an answer.

        Raises:
            GrammarError: as :meth:`compile`, or reading the answer takes too long.
        """
        if self.knows(grammar) and not answer:
            return self.compile(grammar)
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        state = await in_thread(self.compile, grammar)
        if not answer:
            return state
        for _ in range(_TURNS):
            if await in_thread(state.read, answer):
                return state
        raise GrammarError("the grammar takes too long to read the answer so far", code="too_complex")

    def compile(self, grammar: Grammar) -> AnswerMatcher | IsolatedMatcher:
        """Return the state of a grammar before an answer.

        Raises:
            GrammarError: it does not compile, or exceeds the limits.
        """
        found = self._known(grammar) or self._compile(grammar)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found), code=found.code)  # a new one: each has its own traceback
        _, vocab_size, stop_tokens = self._facts
        if isinstance(found, GrammarProcess):
            return IsolatedMatcher(found.fork(), vocab_size, stop_tokens)
        return AnswerMatcher(found, lambda: self._compile_here(grammar), vocab_size, stop_tokens)

    def close(self) -> None:
        """End the thread, and the grammars' processes. What waits is not compiled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _known(self, grammar: Grammar) -> LLMatcher | GrammarProcess | GrammarError | None:
        with self._lock:  # not while one compiles: that takes its time, and others are looked up on the event loop
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                if isinstance(known, GrammarProcess) and known.ended:  # by no fault of the grammar: it had compiled
                    del self._compiled[grammar]
                    return None
            return known

    def _compile_here(self, grammar: Grammar) -> LLMatcher:
        self.load()
        assert self._tokenizer is not None
        return compile_matcher(grammar, self._tokenizer, self._facts[2])

    def _compile(self, grammar: Grammar) -> LLMatcher | GrammarProcess | GrammarError:
        found: LLMatcher | GrammarProcess | GrammarError
        try:
            processes = self._processes
            found = self._compile_here(grammar) if processes is None else processes.start(grammar)
        except GrammarError as error:
            found = GrammarError(str(error), code=error.code)
            if error.code == TOO_MANY:
                return found
        with self._lock:
            self._compiled[grammar] = found
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        return found


@lru_cache(maxsize=4)
def _of_bundle(
    tokenizer_file: Path, fingerprint: str, vocab_size: int, stop_tokens: tuple[int, ...]
) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file, vocab_size, stop_tokens)
