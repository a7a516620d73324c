"""Grammars of strangers have a process of their own each: those that take too long there are refused, or end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("llguidance")

from moa_runtime.grammar.answer_matcher import AnswerMatcher
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.grammar.fork_server import _fork_each, _serve_answer
from moa_runtime.grammar.isolated_matcher import IsolatedMatcher
from moa_runtime.grammar.matcher import GrammarError
from moa_runtime.grammar.processes import GrammarProcess, GrammarProcesses
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


def children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


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
        with pytest.raises(GrammarError):
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


def hostile_answer(compiler, saved) -> tuple[IsolatedMatcher, list[int]]:
    """A state whose process the system ended, and its answer: llguidance consumes a token for seconds, in which no
    thread of Python runs."""
    state, text = compiler.compile(Grammar("json_schema", json.dumps(ARRAYS))), saved.encode('["x",').ids
    assert state.accepts(text)
    while not state.problem(text):
        text.append(saved.token_to_id("["))
        state.forced(text)
    assert len(text) < 20
    return state, text


def test_an_answer_whose_token_takes_long_may_only_end(compiler, saved):
    state, text = hostile_answer(compiler, saved)
    assert state.problem(text) and state.mask(text).nonzero()[0].tolist() == [STOP]
    assert state.among(text, [STOP, STOP + 1]) == ([True, False], 1) and not state.accepts(text)
    assert (state.allowed(text, [1], [0]), state.forced(text)) == ([False], [])


def test_an_answer_that_ends_its_process_harms_no_other_of_its_grammar(compiler, saved):
    grammar = Grammar("json_schema", json.dumps(ARRAYS))
    others = [compiler.compile(grammar) for _ in range(2)]
    assert others[0].accepts([])
    state, _ = hostile_answer(compiler, saved)
    assert state.problem([]) and not any(other.problem([]) for other in others)
    assert compiler.compile(grammar).accepts([])


def test_many_slow_drafts_and_forced_tokens_do_not_add_up(compiler, saved):
    """Each returns after some milliseconds; only what takes longer than it should is counted."""
    state = compiler.compile(Grammar("regex", "a" * 3000))
    answer, a = [], saved.token_to_id("a")
    while len(answer) < 2000:
        answer += state.forced(answer)[:40]
        state.allowed(answer, [a] * 200, range(200))
        assert state.mask(answer)[a]


def test_a_fork_server_that_was_killed_starts_again(compiler):
    state = compiler.compile(Grammar("regex", "before*"))
    compiler._processes._server.kill()
    assert compiled(compiler, Grammar("regex", "killed*")).accepts([]) and state.accepts([])


def test_a_grammars_process_that_was_killed_starts_again(compiler):
    assert compiler.compile(PERSON).accepts([])
    compiler._compiled[PERSON].end()
    assert compiler.compile(PERSON).accepts([])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_grammars_process_that_was_killed_under_an_answer_starts_again(compiler):
    """The answer's process goes on; it belongs to the fork server, not to a process that may remove none."""
    server, grammar = compiler._processes._server.pid, Grammar("regex", "under*")
    before, state = set(children(server)), compiled(compiler, grammar)
    assert state.accepts([])
    (made,) = set(children(server)) - before
    (answers,) = children(made)
    os.kill(made, signal.SIGKILL)
    eventually(lambda: answers in children(server))
    with refused("too_many_grammars", GrammarError):
        compiler.compile(grammar)
    assert compiled(compiler, grammar).accepts([]) and state.accepts([])
    del state
    eventually(lambda: answers not in children(server))


def test_if_no_process_can_be_forked_an_answer_is_refused(monkeypatch):
    def fork():
        raise BlockingIOError

    monkeypatch.setattr("os.fork", fork)
    here, there = socket.socketpair()
    forking = threading.Thread(target=_fork_each, args=(there, None))
    forking.start()
    process = GrammarProcess(here)
    with refused("too_many_grammars", GrammarError):
        process.fork()
    assert not process.ended
    process.end()
    forking.join()


def test_calls_that_take_all_that_is_saved_are_limited_all_the_same(monkeypatch):
    """A timer of 0 seconds would be no limit."""
    allowed: list[float] = []
    monkeypatch.setattr("moa_runtime.grammar.fork_server._allow", allowed.append)
    monkeypatch.setattr("time.process_time", itertools.count().__next__)
    here, there = socket.socketpair()
    serving = threading.Thread(target=_serve_answer, args=(there, SimpleNamespace(bits=bytes)))
    serving.start()
    process = GrammarProcess(here)
    for _ in range(3):
        process.ask((0, [1, 2], "bits", ()))
    process.end()
    serving.join()
    assert len(allowed) == 3 and allowed[0] > allowed[1] == allowed[2] > 0.0005


def test_a_refusal_that_is_remembered_keeps_nothing_of_those_it_refused(compiler):
    """The traceback of an error that is raised again would grow, and hold each Prompt."""
    errors = []
    for _ in range(2):
        with refused("invalid_grammar", GrammarError) as error:
            compiler.compile(Grammar("regex", "a{"))
        errors.append(error.value)
    assert errors[0] is not errors[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_signals_to_the_whole_group_end_no_grammar(compiler):
    """A verifier that is told to end still has answers under way."""
    server = compiler._processes._server.pid
    state = compiled(compiler, Grammar("regex", "signal"))
    for process in (server, *children(server), *(each for child in children(server) for each in children(child))):
        os.kill(process, signal.SIGTERM)
        os.kill(process, signal.SIGINT)
    assert state.forced([]) and compiled(compiler, Grammar("regex", "signals")).forced([])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_ends_with_its_answer_and_that_of_a_grammar_when_it_is_forgotten(compiler):
    server = compiler._processes._server.pid
    before, process = set(children(server)), compiler._processes.start(Grammar("regex", "once"))
    (made,) = set(children(server)) - before
    states = [IsolatedMatcher(process.fork(), VOCAB, [STOP]) for _ in range(2)]
    assert states[0].accepts([]) and states[1].accepts([]) and len(children(made)) == 2
    del states[0]
    eventually(lambda: len(children(made)) == 1)
    del process
    eventually(lambda: made not in children(server))
    assert states[0].accepts([])


def test_too_many_grammars_at_once_are_refused(compiler, monkeypatch):
    held = [compiled(compiler, Grammar("regex", f"held{number}")) for number in range(2)]
    monkeypatch.setattr("moa_runtime.grammar.processes.MOST_GRAMMARS", 2)
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
