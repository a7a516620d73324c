"""Compiles the grammars of prompts, within limits, in a thread of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from moa_runtime.errors import MoaError
from moa_runtime.session.events import Grammar
from moa_server.grammar.answer_matcher import AnswerMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Most bytes of a grammar's text.
MOST_BYTES = 1 << 17
#: Compiled grammars, and reasons why one does not compile, that are kept.
_KEPT = 64
#: Characters of llguidance's reason that are told.
_REASON = 300


class GrammarError(MoaError):
    """A grammar that does not compile, or exceeds the limits."""


def has_llguidance() -> bool:
    """Whether the extra ``grammar`` is installed."""
    return importlib.util.find_spec("llguidance") is not None


class GrammarCompiler:
    """Compiles grammars for a target. Limits are counters, so the result does not depend on the load.

    Args:
        tokenizer_file: the target's ``tokenizer.json``, which is read when the first grammar comes.
        vocab_size, stop_tokens: of the target.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self._tokenizer_file, self._vocab_size, self._stop_tokens = tokenizer_file, vocab_size, list(stop_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar in the compiler's thread, so that :meth:`compile` returns at once."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._find, grammar)

    def compile(self, grammar: Grammar) -> AnswerMatcher:
        """Return the state of a grammar before an answer.

        Raises:
            GrammarError: see the class.
        """
        found = self._find(grammar)
        if isinstance(found, GrammarError):
            raise found
        return AnswerMatcher(found, self._vocab_size, self._stop_tokens)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _find(self, grammar: Grammar) -> LLMatcher | GrammarError:
        with self._lock:  # not while one compiles: that takes its time, and others are looked up on the event loop
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        found: LLMatcher | GrammarError
        try:
            found = self._built(grammar)
        except GrammarError as error:
            found = error
        with self._lock:
            self._compiled[grammar] = found
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    def _built(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if (size := len(grammar.text.encode("utf-8", "replace"))) > MOST_BYTES:
            text = f"the grammar has {size} bytes, this verifier takes {MOST_BYTES}"
            raise GrammarError(text, code="too_large")
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(str(self._tokenizer_file), self._vocab_size, self._stop_tokens)
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the schema is no JSON: {_short(str(error))}", code="invalid_grammar") from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        begun = matcher.deep_copy()
        possible = not begun.is_error() and any(begun.compute_bitmask())
        if not possible:
            reason = _short(begun.get_error() or "it allows no text")
            raise GrammarError(f"the grammar does not compile: {reason}", code="invalid_grammar")
        return matcher


def _source(grammar: Grammar) -> str:
    """Return llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object")
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _short(reason: str) -> str:
    """Return a reason as one line."""
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else line[: _REASON - 3] + "..."
