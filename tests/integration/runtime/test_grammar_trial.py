"""Grammars of strangers are tried in a process of its own: those that its compiler does not survive are refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from moa_runtime.grammar.compiler import GrammarCompiler, GrammarError
from moa_runtime.grammar.trial import GrammarTrial
from moa_runtime.session.events import Grammar
from support.grammars import STOP, VOCAB, saved_tokenizer
from support.server.edge_running import eventually

SLOW = "start: A\nA: " + " & ".join(f"/(.*a{number}.*)/" for number in range(100))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "tokenizer.json"
    saved_tokenizer(path)
    made = GrammarCompiler(path, VOCAB, [STOP])
    made.distrust()
    yield made
    made.close()


def compiled(compiler, grammar):
    """Compile in the compiler's thread, as servers do."""
    return compiler._thread.submit(compiler.compile, grammar).result()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", SLOW),
        Grammar("json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(100)]})),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_grammar_that_compiles_for_minutes_is_refused_and_the_next_one_compiles(compiler, grammar):
    with pytest.raises(GrammarError) as refused:
        compiled(compiler, grammar)
    assert refused.value.code == "too_complex"
    assert compiled(compiler, Grammar("regex", "a*")).accepts([])


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: r0\n" + "\n".join(f'r{n}: "a" r{n + 1} | "b"' for n in range(4000)) + '\nr4000: "c"'),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "$ref": "#/$defs/r0",
                    "$defs": {f"r{n}": {"allOf": [{"$ref": f"#/$defs/r{n + 1}"}]} for n in range(2500)}
                    | {"r2500": {"type": "string"}},
                }
            ),
        ),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_rules_that_name_each_other_in_a_long_row_end_no_process(compiler, grammar):
    """On a thread's usual stack they do."""
    assert compiled(compiler, grammar).accepts([])


def test_a_grammar_that_ends_the_trial_is_refused(tmp_path):
    trial = GrammarTrial(tmp_path / "absent.json", VOCAB, [STOP])
    assert not trial.ends(Grammar("regex", "c*"))
    trial.close()


def test_what_waits_at_the_end_is_not_compiled(compiler):
    """A server would go on for seconds of each, until it is killed."""
    waiting = [compiler._thread.submit(compiler.compile, Grammar("lark", f"{SLOW} & /.*b{n}/")) for n in range(20)]
    eventually(waiting[0].running)
    compiler.close()
    assert waiting[-1].cancelled()
    with pytest.raises(GrammarError):
        waiting[0].result()
    assert compiler._trial._process is None
