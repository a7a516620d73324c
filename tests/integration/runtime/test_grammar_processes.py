"""Grammars of strangers have a process of their own each: those that take too long there are refused, or end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")

from moa_runtime.grammar.answer_matcher import AnswerMatcher
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.grammar.isolated_matcher import IsolatedMatcher
from moa_runtime.grammar.matcher import GrammarError
from moa_runtime.grammar.processes import GrammarProcesses
from moa_runtime.session.events import Grammar
from support.grammars import ARRAYS, STOP, VOCAB, saved_tokenizer
from support.refusals import refused
from support.server.edge_running import eventually

PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
)
SLOW = "start: A\nA: " + " & ".join(f"/(.*a{number}.*)/" for number in range(100))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("grammar") / "tokenizer.json"


@pytest.fixture(scope="module")
def saved(path):
    return saved_tokenizer(path)


@pytest.fixture(scope="module")
def own(saved, path):
    return GrammarCompiler(path, VOCAB, [STOP])


@pytest.fixture(scope="module")
def compiler(saved, path):
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


def test_without_a_tokenizer_each_grammar_is_refused(tmp_path):
    processes = GrammarProcesses(tmp_path / "absent.json", VOCAB, [STOP])
    for _ in range(2):
        with refused("too_complex", GrammarError):
            processes.start(Grammar("regex", "c*"))
    processes.close()


def test_a_state_answers_as_that_of_a_grammar_of_ones_own(compiler, own):
    """At each token of some answers, whatever was asked before."""
    theirs, ours = (each.compile(PERSON) for each in (compiler, own))
    assert isinstance(theirs, IsolatedMatcher) and isinstance(ours, AnswerMatcher)
    rng, answers = np.random.default_rng(1), [[]]
    for _ in range(200):
        answer = answers[rng.integers(len(answers))]
        mask, some = ours.mask(answer), rng.integers(VOCAB, size=4).tolist()
        able = mask.nonzero()[0].tolist()
        tree = [able[0], *some], [0, 1, 1, 0, 0]
        np.testing.assert_array_equal(theirs.mask(answer), mask)
        assert theirs.among(answer, some) == ours.among(answer, some)
        assert theirs.allowed(answer, *tree) == ours.allowed(answer, *tree)
        assert theirs.forced(answer) == ours.forced(answer) and theirs.problem(answer) == ours.problem(answer) == ""
        assert theirs.accepts([*answer, some[0]]) == ours.accepts([*answer, some[0]])
        answers.append([*answer, int(rng.choice(able))])
    assert max(map(len, answers)) > 5


def test_a_grammar_whose_token_takes_long_may_only_end_and_is_not_compiled_again(compiler, saved):
    """llguidance consumes this token for seconds, in which no thread of Python runs."""
    hostile = Grammar("json_schema", json.dumps(ARRAYS))
    text = saved.encode('["x",', add_special_tokens=False).ids
    state, other = compiler.compile(hostile), compiler.compile(PERSON)
    assert state.accepts(text)
    while not state.problem(text):
        text.append(saved.token_to_id("["))
        state.forced(text)
    assert len(text) < 20
    assert state.problem(text) and state.mask(text).nonzero()[0].tolist() == [STOP]
    assert state.among(text, [STOP, STOP + 1]) == ([True, False], 1) and not state.accepts(text)
    assert (state.allowed(text, [1], [0]), state.forced(text)) == ([False], [])
    with refused("too_complex", GrammarError):
        compiler.compile(hostile)
    assert other.accepts([]), "others stay"


def test_a_fork_server_that_was_killed_starts_again(compiler):
    compiler._processes._server.kill()
    compiler._processes._server.wait()
    assert compiled(compiler, Grammar("regex", "killed*")).accepts([])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_to_the_whole_group_end_no_grammar(compiler):
    """A verifier that is told to end still has answers under way."""
    server = compiler._processes._server.pid
    state = compiled(compiler, Grammar("regex", "signal"))
    for process in (server, *map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())):
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGINT)
    assert state.forced([]) and compiled(compiler, Grammar("regex", "signals")).forced([])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_ends_with_the_last_state_of_its_grammar(compiler):
    server = compiler._processes._server.pid
    children = Path(f"/proc/{server}/task/{server}/children")
    process, before = compiler._processes.start(Grammar("regex", "once")), set(children.read_text().split())
    states = [IsolatedMatcher(process, VOCAB, [STOP]) for _ in range(2)]
    assert states[0].accepts([]) and states[1].accepts([])
    del states[0], process
    assert states[0].accepts([])
    states.clear()
    eventually(lambda: len(before - set(children.read_text().split())) == 1)


def test_too_many_grammars_at_once_are_refused(compiler, monkeypatch):
    held = [compiled(compiler, Grammar("regex", f"held{number}")) for number in range(2)]
    monkeypatch.setattr("moa_runtime.grammar.processes.MOST_PROCESSES", 2)
    for _ in range(2):  # which is not remembered
        with refused("too_many_grammars", GrammarError):
            compiled(compiler, Grammar("regex", "more"))
    assert held[1].accepts([])
    monkeypatch.undo()
    assert compiled(compiler, Grammar("regex", "more")).accepts([])


def test_what_waits_at_the_end_is_not_compiled(compiler):
    """A server would go on for seconds of each, until it is killed."""
    waiting = [compiler._thread.submit(compiler.compile, Grammar("lark", f"{SLOW} & /.*b{n}/")) for n in range(20)]
    eventually(waiting[0].running)
    compiler.close()
    assert waiting[-1].cancelled()
    with pytest.raises(GrammarError):
        waiting[0].result()
    assert compiler._processes._server is None
