"""Grammars of answers that may reason before they conform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from moa_runtime.grammar.matcher import spaced_schema
from moa_runtime.reasoning import CLOSE, OPEN, Thought
from moa_runtime.session.events import Grammar, Sampling


def reasoning_rules(start: str, thought: Thought, special: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return the right side of the start rule, and the rules it needs, of an answer that may reason before ``start``.

    Args:
        start: the right side of the start rule of an answer without reasoning, in llguidance's Lark.
        thought: see :meth:`moa_runtime.tokenizer.ChatTokenizer.thought`.
        special: ids of the marks that are special tokens.
    """
    if not thought:
        return start, []
    opens, closes = (f"<[{special[mark]}]>" if mark in special else json.dumps(mark) for mark in (OPEN, CLOSE))
    begins = f"{opens} " if thought == "may" else ""
    lazy = "" if CLOSE in special else "[lazy]"
    rules = [f"thought{lazy}: {begins}/(.|\\n)*/ {closes}", "SPACE: /[ \\n]{0,4}/", f"answer: {start}"]
    return "answer | thought SPACE answer" if thought == "may" else "thought SPACE answer", rules


def after_reasoning(sampling: Sampling, thought: Thought, special: Mapping[str, int]) -> Sampling:
    """Return the sampling of an answer that is JSON after its reasoning, if answers may have some.

    Regular expressions and Lark grammars hold for the whole answer, and a schema that is no object stays for the
    verifier to refuse. Args: see :func:`reasoning_rules`.
    """
    grammar = sampling.grammar
    if not thought or grammar is None or grammar.kind not in ("json_object", "json_schema"):
        return sampling
    try:
        schema = json.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    except (ValueError, RecursionError):
        return sampling
    if not isinstance(schema, dict):
        return sampling
    start, rules = reasoning_rules(f"%json {spaced_schema(schema)}", thought, special)
    return replace(sampling, grammar=Grammar("lark", "\n".join(["%llguidance {}", f"start: {start}", *rules])))
