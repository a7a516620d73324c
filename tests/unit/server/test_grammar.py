"""Grammars: what may follow along an answer and its drafts, what is forced, and what does not compile."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading

import numpy as np
import pytest

pytest.importorskip("llguidance")

from moa_runtime.drafters.base import DraftToken
from moa_runtime.drafters.grammar_mask import GrammarMask
from moa_runtime.grammar.answer_matcher import AnswerMatcher
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.grammar.matcher import MOST_BYTES, GrammarError
from moa_runtime.session.events import AnswerSampling, Grammar
from moa_runtime.session.tree import path_to
from moa_server.engine.sampling import Chooser
from support.grammars import STOP, VOCAB, saved_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "tokenizer.json"
    return saved_tokenizer(path), path


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer[1], VOCAB, [STOP])
    yield made
    made.close()


def written(chooser_of, rng, most=200):
    """What a target of random logits writes under a grammar."""
    answer: list[int] = []
    while len(answer) < most and answer[-1:] != [STOP]:
        answer.append(chooser_of(answer).choose(rng.standard_normal(VOCAB).astype(np.float32) * 3))
    return answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_target_of_random_logits_writes_conforms(compiler, tokenizer, temperature):
    seen = set()
    for seed in range(30):
        sampling = AnswerSampling(temperature, seed=seed, grammar=PERSON, answer_from=2, state=compiler.compile(PERSON))
        answer = written(lambda text, own=sampling: Chooser(own, [1, 2, *text], [STOP]), np.random.default_rng(seed))
        assert answer[-1] == STOP
        value = json.loads(tokenizer[0].decode(answer[:-1]))
        assert set(value) == {"name", "ok"} and value["name"] in ("ab", "abc") and value["ok"] in (True, False)
        seen.add(value["name"])
    assert seen == {"ab", "abc"}


def test_the_state_follows_any_answer_it_is_asked_about(compiler):
    """After rewinds, branches and answers that violate the grammar it is that of a new state."""
    rng, texts = random.Random(5), []
    for seed in range(6):
        state = compiler.compile(PERSON)
        sampling = AnswerSampling(1.0, seed=seed, grammar=PERSON, answer_from=0, state=state)
        texts.append(written(lambda text, own=sampling: Chooser(own, text, [STOP]), np.random.default_rng(seed)))
    asked = compiler.compile(PERSON)
    for _ in range(80):
        text = rng.choice(texts)
        answer = [*text[: rng.randrange(len(text) + 1)], *([] if rng.random() < 0.8 else [7, 7])]
        fresh = compiler.compile(PERSON)
        assert (asked.mask(answer) == fresh.mask(answer)).all() and asked.accepts(answer) == fresh.accepts(answer)
        assert asked.accepts(answer) == (answer[-2:] != [7, 7])


def test_an_answer_that_meets_a_limit_is_read_once(compiler, tokenizer, monkeypatch):
    """The matcher would read it from the beginning each time: a second, in which the event loop stands still."""
    state = compiler.compile(Grammar("lark", 'start: s\ns: s s | /[^b]/ | ""'))
    answer = tokenizer[0].encode("a" * 400).ids
    assert not state.accepts(answer)
    monkeypatch.setattr(state, "_matcher", None)  # whatever is read fails
    assert not state.accepts(answer) and not state.accepts([*answer, *answer])
    monkeypatch.undo()
    assert state.accepts(answer[:3]) and state.accepts(answer[:2]) and not state.accepts(answer)


@pytest.mark.parametrize("grammar", [PERSON, Grammar("json_object", "")], ids=lambda one: one.kind)
def test_white_space_in_json_is_fixed(compiler, tokenizer, grammar):
    """A target that may write any would begin a new line for ever."""
    begun = tokenizer[0].encode("{").ids
    assert not any(compiler.compile(grammar).mask(begun)[tokenizer[0].encode(" \n\t").ids])
    assert compiler.compile(grammar).accepts(tokenizer[0].encode('{"name": "ab", "ok": true}').ids)
    assert not compiler.compile(grammar).accepts(tokenizer[0].encode('{"name":"ab"').ids)


def test_a_schema_may_have_its_own_white_space(compiler, tokenizer):
    own = {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}
    assert compiler.compile(Grammar("json_schema", json.dumps(own))).accepts(tokenizer[0].encode('{ "name"').ids)


def test_a_token_is_forced_if_and_only_if_its_mask_has_one_bit(compiler, tokenizer):
    constant = compiler.compile(Grammar("regex", "q(rst|uvw)xy"))
    first = constant.forced([])
    assert tokenizer[0].decode(first) == "q"
    either = [*first, tokenizer[0].token_to_id("r")]
    forced = constant.forced(either)
    assert tokenizer[0].decode(forced[:-1]) == "stxy" and forced[-1] == STOP
    for count in range(len(forced)):
        assert np.flatnonzero(constant.mask([*either, *forced[:count]])).tolist() == [forced[count]]
    assert constant.mask(first).sum() == 2


def test_of_a_tree_the_paths_are_allowed_that_the_grammar_allows(compiler, tokenizer):
    state, ids = compiler.compile(Grammar("regex", "ab*c")), [tokenizer[0].token_to_id(one) for one in "abc"]
    rng = random.Random(3)
    for _ in range(50):
        parents = [rng.randrange(number + 1) for number in range(8)]
        tokens = [rng.choice(ids) for _ in parents]
        answer = rng.choice([[], ids[:1], ids[:2]])
        expected = [state.accepts([*answer, *path_to(node, tokens, parents)]) for node in range(1, 9)]
        assert state.allowed(answer, tokens, parents) == expected


def test_a_choice_with_prepared_masks_is_the_same(compiler):
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((9, VOCAB)).astype(np.float32)
    sampling = AnswerSampling(1.0, seed=4, grammar=PERSON, answer_from=1, state=compiler.compile(PERSON))
    draft = compiler.compile(PERSON).forced([])[:6]
    assert draft
    tokens, parents = [*draft, 5, 5], [*range(len(draft)), 0, 1]
    prepared = Chooser(sampling, [3], [STOP])
    prepared.prepare(tokens, parents)
    for node in range(len(draft) + 1):
        path = path_to(node, tokens, parents)
        assert prepared.choose(logits[node], path) == Chooser(sampling, [3], [STOP]).choose(logits[node], path)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", "[1]"),
        Grammar("json_schema", '{"type": "nothing"}'),
        Grammar("json_schema", '{"$ref": "#/definitions/none"}'),
        Grammar("json_schema", "[" * 100_000),
        Grammar("regex", "a{"),
        Grammar("regex", "(" * 3000 + "a" + ")" * 3000),
        Grammar("lark", "start: nothing"),
        Grammar("lark", "start:"),
        Grammar("lark", 'start: "x" a\na: a'),
        Grammar("regex", ""),
        Grammar("json_schema", "9" * 5000),
        Grammar("regex", "x" * (MOST_BYTES + 1)),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:24]}",
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(compiler, grammar):
    for _ in range(2):
        with pytest.raises(GrammarError) as refused:
            compiler.compile(grammar)
        assert refused.value.code in ("invalid_grammar", "too_large")
        text = str(refused.value)
        assert len(text) < 400 and not any(mark in text for mark in ("\n", " | ", "non-verbose", "sys."))


def test_an_answer_at_a_limit_ends_and_says_so(compiler):
    """Whatever is asked, some token may follow."""
    state = compiler.compile(Grammar("regex", "abc"))
    assert np.flatnonzero(state.mask([9, 9])).tolist() == [STOP] and not state.accepts([9, 9])
    assert compiler.compile(Grammar("json_object")).mask([]).any()


def test_a_grammar_that_compiles_for_long_keeps_no_other_waiting(tokenizer, monkeypatch):
    made, going = GrammarCompiler(tokenizer[1], VOCAB, [STOP]), threading.Event()
    made.compile(PERSON)

    def refuse(*_):
        going.wait()
        raise GrammarError("refused", code="invalid_grammar")

    monkeypatch.setattr("moa_runtime.grammar.compiler.compile_matcher", refuse)

    async def both():
        slow = asyncio.create_task(made.compiled(Grammar("regex", "a*")))
        await asyncio.sleep(0)
        assert (await made.compiled(PERSON)).accepts([])
        going.set()
        with pytest.raises(GrammarError):
            await slow

    asyncio.run(both())
    made.close()


def test_an_answer_so_far_is_read_in_the_compilers_thread(tokenizer, monkeypatch):
    """An ambiguous grammar takes milliseconds for each of its tokens, in which no step would begin."""
    made, read = GrammarCompiler(tokenizer[1], VOCAB, [STOP]), []
    consume = AnswerMatcher._sync

    def noted(self, answer, *seconds):
        read.append((threading.current_thread(), list(self._consumed)))
        return consume(self, answer, *seconds)

    monkeypatch.setattr(AnswerMatcher, "_sync", noted)
    tokens = tokenizer[0].encode("aaaa").ids
    state = asyncio.run(made.compiled(Grammar("regex", "a*"), tokens))
    assert state.accepts(tokens)
    made.close()
    (first, nothing), (second, known) = read
    assert first is not second is threading.current_thread() and (nothing, known) == ([], tokens)


def where_limit_is_met(tokenizer, state, *, draft=None):
    """The length of an answer of random letters at its limit; a draft of others is checked before each token."""
    rng, others, answer = random.Random(5), random.Random(6), list[int]()
    letters = [tokenizer.token_to_id(letter) for letter in "abcdefghijklmn"]
    while not state.problem(answer):
        token = rng.choice(letters)
        if draft is not None:
            draft(state, answer, [others.choice(letters) for _ in range(4)])
        assert state.mask(answer)[token] or state.problem(answer)
        answer.append(token)
    return len(answer)


def masks_of_draft(state, answer, draft):
    for length in range(1, len(draft) + 1):
        state.mask(answer + draft[:length])


@pytest.mark.parametrize("draft", [lambda state, *draft: state.allowed(*draft, range(4)), masks_of_draft])
def test_a_limit_that_a_draft_meets_ends_no_answer(tokenizer, draft):
    """llguidance's copies share a lexer: after a limit it refuses whatever no copy has met before, and says nothing."""
    text = " & ".join(f"/(.*{letter}.{{50}}.*){letter}?/" for letter in "abcd")
    made = GrammarCompiler(tokenizer[1], VOCAB, [STOP])
    grammar = Grammar("lark", f"start: A\nA: {text}")
    alone = where_limit_is_met(tokenizer[0], made.compile(grammar))
    drafted = where_limit_is_met(tokenizer[0], made.compile(grammar), draft=draft)
    assert 1 < alone == drafted
    made.close()


AMBIGUOUS = Grammar("lark", "start: s\ns: s s | /[ab]/")


@pytest.fixture
def slow_tokens(monkeypatch):
    """Each look at the clock of a thread finds a millisecond gone."""
    ticks = itertools.count()
    monkeypatch.setattr("time.thread_time", lambda: next(ticks) / 1000)


def test_a_draft_after_a_slow_grammar_is_checked_in_part(compiler, tokenizer, slow_tokens):
    a = tokenizer[0].token_to_id("a")
    found = compiler.compile(AMBIGUOUS).allowed([a], [a] * 300, range(300))
    assert found == [True] * 9 + [False] * 291  # 10 ms
    assert 0 < len(compiler.compile(Grammar("regex", "a{40}")).forced([a])) < 12
    sampling = AnswerSampling(grammar=AMBIGUOUS, answer_from=0, state=compiler.compile(AMBIGUOUS))
    mask, kept = GrammarMask(sampling, [a]), [DraftToken(a, -0.1)]
    assert [len(mask.left(kept, [a] * count)) for count in range(20)] == [1] * 10 + [0] * 10
    assert mask.forced() == mask.few() == []


def test_an_answer_so_far_is_read_in_turns_with_other_grammars(tokenizer, monkeypatch, slow_tokens):
    monkeypatch.setattr("moa_runtime.grammar.answer_matcher.READ_S", 0.002)
    made = GrammarCompiler(tokenizer[1], VOCAB, [STOP])
    answer, done = tokenizer[0].encode("a" * 60).ids, []

    async def compile_two():
        async def note(name, *what):
            await made.compiled(*what)
            done.append(name)

        reading = asyncio.create_task(note("long", Grammar("regex", "a*"), answer))
        await asyncio.sleep(0)
        await note("short", Grammar("regex", "b*"))
        await reading
        monkeypatch.setattr("moa_runtime.grammar.compiler._TURNS", 3)
        with pytest.raises(GrammarError) as refused:
            await made.compiled(Grammar("regex", "a*"), answer)
        assert refused.value.code == "too_complex"

    asyncio.run(compile_two())
    made.close()
    assert done == ["short", "long"]


def test_after_a_limit_only_the_newest_tokens_are_read_again(compiler, tokenizer, monkeypatch):
    """A draft has many paths that meet one."""
    state, a = compiler.compile(AMBIGUOUS), tokenizer[0].token_to_id("a")
    longest = next(count for count in range(100, 400) if not state.accepts([a] * count)) - 1
    expected = state.mask([a] * longest)
    monkeypatch.setattr(state, "_fresh", None)  # the whole answer is not read again
    for _ in range(3):
        assert not state.accepts([a] * (longest + 1)) and (state.mask([a] * longest) == expected).all()


def test_a_token_that_ends_answers_does_so_only_where_the_grammar_may_end(compiler, tokenizer):
    """A grammar may name it within its text."""
    a = tokenizer[0].token_to_id("a")
    state = compiler.compile(Grammar("lark", f'start: "a" (<[{STOP}]> | "c") "b"'))
    assert np.flatnonzero(state.mask([a])).tolist() == [tokenizer[0].token_to_id("c")]
    assert not state.accepts([a, STOP]) and state.allowed([a], [STOP], [0]) == [False]
    with pytest.raises(GrammarError):
        compiler.compile(Grammar("lark", f'start: "a" <[{STOP}]> "b"'))


def test_an_ambiguous_grammar_ends_before_it_costs_others_much(compiler, tokenizer):
    state = compiler.compile(Grammar("lark", 'start: s\ns: s s s | s s | "a" | '))
    letter = tokenizer[0].token_to_id("a")
    assert state.mask([letter] * 20)[letter]
    assert np.flatnonzero(state.mask([letter] * 150)).tolist() == [STOP]
