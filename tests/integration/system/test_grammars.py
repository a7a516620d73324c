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
from moa_runtime.events import AnswerFinished, FinishReason
from moa_runtime.session.events import Grammar, Policy, Sampling
from moa_runtime.session.server import AnswerSampling
from moa_server.engine.baseline import PlainDecoding
from support.refusals import refused
from support.server.running import Verifier
from support.system.asking import QUESTION, QUICK, ask, ask_and_leave, chatting, endpoint, ids

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


async def plain(verifier: Verifier, chat: Chat, answer: AnswerFinished, sampling: Sampling) -> list[int]:
    """What the target writes alone after the same prompt: a choice a step."""
    assert sampling.grammar is not None and verifier.parts.grammars is not None
    engine, length = verifier.parts.engine, len(chat.tokens) - len(answer.tokens)
    state = verifier.parts.grammars.compile(sampling.grammar)
    own = AnswerSampling(**vars(sampling), answer_from=length, state=state)
    decoding, tokens = PlainDecoding(engine, chat.tokens[:length], own, MOST), list[int]()
    while (job := decoding.next()) is not None:
        [outcome] = await engine.step([request := job.request(0, 1 << 20)])
        job.take(request, outcome)
        tokens.append(decoding.take(job).token)
    engine.release(decoding.sequence)
    return tokens


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
                assert ids(answer) == await plain(verifier, chat, answer, sampling), (drafting, grammar)
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


async def test_text_written_before_that_violates_the_grammar_is_refused(chat: Chat) -> None:
    """A continued answer conforms from its first token on."""
    async with chat:
        await ask(chat, count=3)
        with refused("protocol", ChatError):
            sampling = Sampling(grammar=Grammar("regex", "[0-9]{300}"))
            async for _ in chat.continue_answer(max_new_tokens=3, sampling=sampling):
                pass


async def test_a_device_that_does_not_know_the_grammar_writes_nothing_offline(
    bundle: Bundle, verifier: Verifier
) -> None:
    """The answer waits, also with the policy that keeps the device's text, and is the target's own at last."""
    sampling = Sampling(1.0, seed=5, grammar=Grammar("regex", "[a-z ]{400}"))
    async with chatting(bundle, endpoint(verifier), policy=Policy.KEEP) as chat:
        answer, _ = await ask_and_leave(chat, count=MOST, after=4, sampling=sampling)
        assert ids(answer) == await plain(verifier, chat, answer, sampling)
        assert answer.statistics.offline == 0 and re.fullmatch("[a-z ]+", answer.text)
