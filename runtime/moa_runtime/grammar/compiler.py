"""Compiles the grammars of answers, within limits, in a thread of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_runtime.bundle import Bundle
from moa_runtime.errors import MoaError, json_problem
from moa_runtime.grammar.answer_matcher import MOST_FORCED, AnswerMatcher
from moa_runtime.grammar.trial import GrammarTrial
from moa_runtime.session.events import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Most bytes of a grammar's text.
MOST_BYTES = 1 << 17
#: llguidance's limits of a mask, Earley items and lexer fuel: smaller than its own, so that a mask takes no longer than
#: a pass of a small target.
_ITEMS, _FUEL = 5_000, 50_000
#: Most Earley items in a row of a Lark grammar, which may be ambiguous: drafts are not counted by the limits above, and
#: the time of a token grows with more than the square of its row. An optional property of a tool has about four.
_ROW = 500
#: llguidance's options of a JSON schema: white space as targets were trained on it, so that most tokens are forced
#: and white space ends.
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
#: Stack of a thread that compiles, bytes: a rule that names another takes some 4 KB.
STACK_BYTES = 64 << 20
#: Compiled grammars, and reasons why one does not compile, that are kept.
_KEPT = 64
#: Turns of :data:`moa_runtime.grammar.answer_matcher.READ_S` in which an answer so far is read.
_TURNS = 60
#: Characters of llguidance's reason that are told.
_REASON = 300
#: Sentences in the place of llguidance's reasons, by how these begin.
_REASONS = {
    "NoExtensionBias": "it allows no complete text",
    "parser error: Too many items": f"it has more than {_ITEMS} items at once, perhaps because no text of it ends",
}


class GrammarError(MoaError):
    """A grammar that does not compile, or exceeds the limits."""


def spaced_schema(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as llguidance takes it: with :data:`SPACING`, unless it has options of its own."""
    return json.dumps({"x-guidance": SPACING, **schema})


def has_llguidance() -> bool:
    """Whether the extra ``grammar`` is installed."""
    return importlib.util.find_spec("llguidance") is not None


def check_size(grammar: Grammar) -> None:
    """Raise GrammarError if a grammar has more than :data:`MOST_BYTES`."""
    if (size := len(grammar.text.encode("utf-8", "replace"))) > MOST_BYTES:
        text = f"the grammar has {size} bytes, at most {MOST_BYTES} are compiled"
        raise GrammarError(text, code="too_large")


class GrammarCompiler:
    """Compiles grammars for a target. Limits are counters and processor time: the result does not depend on the load.

    Args:
        tokenizer_file: the target's ``tokenizer.json``, which is read when the first grammar comes.
        vocab_size, stop_tokens: of the target.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> None:
        self._tokenizer_file, self._vocab_size, self._stop_tokens = tokenizer_file, vocab_size, list(stop_tokens)
        self._endings = sum(1 << token for token in set(stop_tokens))
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._trial: GrammarTrial | None = None
        before = threading.stack_size(STACK_BYTES)
        self._thread.submit(int).result()  # starts the thread
        threading.stack_size(before)

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> GrammarCompiler | None:
        """Return that of a bundle's target, the same object for each call; None without the extra ``grammar``."""
        manifest = bundle.manifest
        facts = manifest.fingerprints.tokenizer, manifest.vocab_size, manifest.stop_tokens
        return _of_bundle(bundle.tokenizer_path, *facts) if has_llguidance() else None

    def distrust(self) -> None:
        """From now on, try each grammar in a process of its own first: it is a stranger's."""
        self._trial = GrammarTrial(self._tokenizer_file, self._vocab_size, self._stop_tokens)

    def load(self) -> LLTokenizer:
        """Build llguidance's tokenizer unless it is built, and return it. A server does so before it serves: it takes
        half a second of a core, in which no other thread of Python runs."""
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(str(self._tokenizer_file), self._vocab_size, self._stop_tokens)
        return self._tokenizer

    def knows(self, grammar: Grammar) -> bool:
        """Return whether a grammar is compiled, or is known not to compile."""
        return self._known(grammar) is not None

    async def compiled(self, grammar: Grammar, answer: Sequence[int] = ()) -> AnswerMatcher:
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
        for _ in range(_TURNS):
            if await in_thread(state.read, answer):
                return state
        raise GrammarError("the grammar takes too long to read the answer so far", code="too_complex")

    def compile(self, grammar: Grammar) -> AnswerMatcher:
        """Return the state of a grammar before an answer.

        Raises:
            GrammarError: it does not compile, or exceeds the limits.
        """
        found = self._known(grammar) or self._compile(grammar)
        if isinstance(found, GrammarError):
            raise found
        return AnswerMatcher(found, self._vocab_size, self._stop_tokens)

    def close(self) -> None:
        """End the thread, and the trial's process. What waits is not compiled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _known(self, grammar: Grammar) -> LLMatcher | GrammarError | None:
        with self._lock:  # not while one compiles: that takes its time, and others are looked up on the event loop
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
            return known

    def _compile(self, grammar: Grammar) -> LLMatcher | GrammarError:
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
        from llguidance import LLMatcher, LLParserLimits

        check_size(grammar)
        if self._trial is not None and not self._trial.ends(grammar):
            text = "the grammar takes too long to compile, or is nested too deeply"
            raise GrammarError(text, code="too_complex")
        tokenizer = self.load()
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(
                f"the schema is no JSON: {_short(json_problem(error))}", code="invalid_grammar"
            ) from error
        row = _ROW if grammar.kind == "lark" else None
        limits = LLParserLimits(
            step_max_items=_ITEMS, step_lexer_fuel=_FUEL, max_items_in_row=row, verbose_errors=False
        )
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if reason := self._dead_end(matcher):
            raise GrammarError(f"the grammar does not compile: {_short(reason)}", code="invalid_grammar")
        return matcher

    def _dead_end(self, matcher: LLMatcher) -> str:
        """Return why a grammar has no answer, as far as its first tokens show that; empty if it may have one."""
        if not matcher.is_error():
            # Also because the first mask of a large grammar takes long, and copies need not compute it again.
            matcher.compute_bitmask()
        text, first = matcher.deep_copy(), True
        for _ in range(MOST_FORCED):
            able = 0 if text.is_error() else int.from_bytes(text.compute_bitmask(), "little")
            if text.is_error() or not able:
                told = text.get_error().splitlines()
                reason = " ".join(line for line in told if not line.startswith(" "))  # without quoted lines and marks
                known = (sentence for begins, sentence in _REASONS.items() if reason.startswith(begins))
                return next(known, reason) or "it allows no text"
            if not able & ~self._endings:
                if not text.is_accepting():
                    return "it goes on after a token that ends an answer"
                return "it allows an empty text alone" if first else ""
            if able.bit_count() > 1:
                return ""
            text.consume_token(able.bit_length() - 1)
            first = False
        return ""


@lru_cache(maxsize=4)
def _of_bundle(
    tokenizer_file: Path, fingerprint: str, vocab_size: int, stop_tokens: tuple[int, ...]
) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file, vocab_size, stop_tokens)


def _source(grammar: Grammar) -> str:
    """Return llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(spaced_schema({"type": "object"}))
        case "json_schema":
            schema = json.loads(grammar.text)
            if not isinstance(schema, dict | bool):
                raise GrammarError("a schema is an object", code="invalid_grammar")
            text = spaced_schema(schema) if isinstance(schema, dict) else grammar.text
            return LLMatcher.grammar_from_json_schema(text)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _short(reason: str) -> str:
    """Return a reason as one line."""
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else line[: _REASON - 3] + "..."
