"""Compiles grammars with llguidance, within its limits."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moa_runtime.errors import MoaError, json_problem
from moa_runtime.grammar.answer_matcher import MOST_FORCED
from moa_runtime.session.events import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Most bytes of a grammar's text.
MOST_BYTES = 1 << 17
#: llguidance's limits of a mask, Earley items and lexer fuel: smaller than its own, so that a mask takes no longer than
#: a pass of a small target.
_ITEMS, _FUEL = 5_000, 50_000
#: Most Earley items in a row of a Lark grammar, which may be ambiguous: consumed tokens are not counted by the limits
#: above, and the time of a token grows with more than the square of its row. An optional property of a tool has about
#: four.
_ROW = 500
#: llguidance's options of a JSON schema: white space as targets were trained on it, so that most tokens are forced
#: and white space ends.
SPACING = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
#: Stack of a thread that compiles, bytes: a rule that names another takes some 4 KB.
_STACK_BYTES = 64 << 20
_STACK_LOCK = threading.Lock()
#: Code of the error of a grammar that may be compiled later.
TOO_MANY = "too_many_grammars"
#: Characters of llguidance's reason that are told.
_REASON = 300
#: Sentences in the place of llguidance's reasons, by how these begin.
_REASONS = {
    "NoExtensionBias": "it allows no complete text",
    "parser error: Too many items": f"it has more than {_ITEMS} items at once, perhaps because no text of it ends",
}


T = TypeVar("T")


class GrammarError(MoaError):
    """A grammar that does not compile, or exceeds the limits."""


def has_llguidance() -> bool:
    """Whether the extra ``grammar`` is installed."""
    return importlib.util.find_spec("llguidance") is not None


def read_vocabulary(tokenizer_file: Path, vocab_size: int, stop_tokens: Sequence[int]) -> LLTokenizer:
    """Build llguidance's tokenizer from a ``tokenizer.json``: it takes half a second, in which no other thread of
    Python runs."""
    from llguidance import LLTokenizer

    return LLTokenizer(str(tokenizer_file), vocab_size, list(stop_tokens))


def spaced_schema(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as llguidance takes it: with :data:`SPACING`, unless it has options of its own."""
    return json.dumps({"x-guidance": SPACING, **schema})


def check_size(grammar: Grammar) -> None:
    """Raise GrammarError if a grammar has more than :data:`MOST_BYTES`."""
    if (size := len(grammar.text.encode("utf-8", "replace"))) > MOST_BYTES:
        text = f"the grammar has {size} bytes, at most {MOST_BYTES} are compiled"
        raise GrammarError(text, code="too_large")


def with_large_stack(work: Callable[[], T]) -> T:
    """Do work on a thread whose stack is large enough for a grammar that is nested deeply."""
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        thread = ThreadPoolExecutor(1, "grammar")
        done = thread.submit(work)  # starts the thread
        threading.stack_size(before)
    with thread:
        return done.result()


def compile_matcher(grammar: Grammar, tokenizer: LLTokenizer, stop_tokens: Sequence[int]) -> LLMatcher:
    """Compile a grammar.

    Raises:
        GrammarError: it does not compile, allows no answer, or exceeds the limits.
    """
    check_size(grammar)
    return with_large_stack(lambda: _compile(grammar, tokenizer, stop_tokens))


def _compile(grammar: Grammar, tokenizer: LLTokenizer, stop_tokens: Sequence[int]) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {_short(json_problem(error))}", code="invalid_grammar") from error
    row = _ROW if grammar.kind == "lark" else None
    limits = LLParserLimits(step_max_items=_ITEMS, step_lexer_fuel=_FUEL, max_items_in_row=row, verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if reason := _dead_end(matcher, sum(1 << token for token in set(stop_tokens))):
        raise GrammarError(f"the grammar does not compile: {_short(reason)}", code="invalid_grammar")
    return matcher


def _dead_end(matcher: LLMatcher, endings: int) -> str:
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
        if not able & ~endings:
            if not text.is_accepting():
                return "it goes on after a token that ends an answer"
            return "it allows an empty text alone" if first else ""
        if able.bit_count() > 1:
            return ""
        text.consume_token(able.bit_length() - 1)
        first = False
    return ""


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
