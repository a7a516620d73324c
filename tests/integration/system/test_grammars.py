"""Answers that conform to a grammar, through device, link and verifier: with drafts the same text as without."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")

from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat, ChatError
from moa_runtime.events import AnswerUpdate, FinishReason, Paused, PauseReason
from moa_runtime.session.events import Grammar, Policy, Sampling
from support.grammars import ARRAYS
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import (
    QUESTION,
    QUICK,
    ask,
    ask_and_leave,
    chatting,
    constrained_decoding,
    endpoint,
    ids,
    written_offline,
)

SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}}},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"long name of a key": {"type": "null"}}}]},
]
for _schema in (SCHEMAS[0], SCHEMAS[2]["anyOf"][1]):
    _schema |= {"required": list(_schema["properties"]), "additionalProperties": False}
GRAMMARS = [Grammar("json_schema", json.dumps(schema)) for schema in SCHEMAS]
GRAMMARS += [Grammar("regex", "(yes|no), because [a-z ]{3,12}\\."), Grammar("json_object")]
GRAMMARS += [Grammar("lark", 'start: "(" start ")" | /[0-9]/')]
MOST = 60


async def test_text_with_drafts_is_that_without(bundle: Bundle, verifier: Verifier) -> None:
    """Drafts of the device and the server, chains and trees; forced tokens; and every complete answer conforms."""
    rng, forced, ended = random.Random(1), 0, 0
    for drafting in ("device", "server", "auto"):
        async with chatting(bundle, endpoint(verifier), settings=replace(QUICK, drafting=drafting)) as chat:
            for number, grammar in enumerate(GRAMMARS):
                heat = {"presence_penalty": 0.5} if number % 2 else {}
                sampling = Sampling(rng.choice([0.0, 1.0]), seed=rng.randrange(1 << 32), grammar=grammar, **heat)
                chat.restore([])
                answer = await ask(chat, QUESTION, count=MOST, sampling=sampling)
                assert ids(answer) == await constrained_decoding(verifier, chat, answer, MOST, sampling), (
                    drafting,
                    grammar,
                )
                forced += len(answer.tokens) - answer.statistics.rounds
                if answer.reason is FinishReason.STOP:
                    ended += 1
                    if grammar.kind.startswith("json"):
                        json.loads(answer.text)
    assert ended > len(GRAMMARS) and forced > 0


async def test_a_grammar_that_does_not_compile_is_refused_and_the_next_question_answered(chat: Chat) -> None:
    async with chat:
        for text in ('{"type": "nothing"}', "[" * 5000):
            with refused("protocol", ChatError):
                await ask(chat, sampling=Sampling(grammar=Grammar("json_schema", text)))
        assert (await ask(chat, count=2)).tokens


async def test_json_follows_reasoning(chat: Chat, monkeypatch) -> None:
    async with chat:
        monkeypatch.setattr(chat.tokenizer, "thought", lambda thinking: "begun")
        sampling = Sampling(grammar=Grammar("json_object"))
        assert not (await ask(chat, count=6, sampling=sampling)).text.startswith("{")
        chat.restore([])
        monkeypatch.undo()
        assert (await ask(chat, count=6, sampling=sampling)).text.startswith("{")


async def test_text_written_before_that_violates_the_grammar_is_refused(chat: Chat) -> None:
    """A continued answer conforms from its first token on."""
    async with chat:
        await ask(chat, count=3)
        with refused("protocol", ChatError):
            sampling = Sampling(grammar=Grammar("regex", "[0-9]{300}"))
            async for _ in chat.continue_answer(max_new_tokens=3, sampling=sampling):
                pass


LETTERS = Sampling(1.0, seed=5, grammar=Grammar("regex", "[a-z ]{400}"))


@pytest.mark.parametrize("policy", [Policy.ROLLBACK, Policy.KEEP])
async def test_what_the_device_writes_offline_conforms(writing_bundle, verifier: Verifier, policy) -> None:
    """So its text can be kept, too."""
    settings, bundle = replace(QUICK, offline="writer"), Bundle.open(writing_bundle)
    async with chatting(bundle, endpoint(verifier), policy=policy, settings=settings) as chat:
        answer, seen = await ask_and_leave(chat, count=MOST, after=4, sampling=LETTERS)
        assert max(map(written_offline, seen)) > 3
        assert all(
            re.fullmatch("[a-z ]*", event.committed + event.tentative)
            for event in seen
            if isinstance(event, AnswerUpdate)
        )
        if policy is Policy.ROLLBACK:
            assert ids(answer) == await constrained_decoding(verifier, chat, answer, MOST, LETTERS)
        else:
            assert answer.statistics.kept > 3 and len(answer.tokens) == MOST


async def test_a_device_without_the_extra_writes_nothing_offline(bundle: Bundle, verifier: Verifier, monkeypatch):
    """The answer waits, also with the policy that keeps the device's text, and is the target's own at last."""
    monkeypatch.setattr("moa_runtime.grammar.compiler.has_llguidance", lambda: False)
    async with chatting(bundle, endpoint(verifier), policy=Policy.KEEP) as chat:
        answer, seen = await ask_and_leave(chat, count=MOST, after=4, sampling=LETTERS)
        assert ids(answer) == await constrained_decoding(verifier, chat, answer, MOST, LETTERS)
        assert Paused(PauseReason.GRAMMAR) in seen
        assert answer.statistics.offline == 0 and re.fullmatch("[a-z ]+", answer.text)


async def test_an_answer_whose_grammar_meets_a_limit_says_so(chat: Chat) -> None:
    async with chat:
        likely = tuple((token, 100.0) for token in chat.tokenizer.encode('",'))
        sampling = Sampling(1.0, logit_bias=likely, grammar=Grammar("json_schema", json.dumps(ARRAYS)))
        answer = await ask(chat, count=MOST, sampling=sampling)
        assert answer.reason is FinishReason.GRAMMAR and answer.text == '["x",'
