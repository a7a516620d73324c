"""Measure answers that conform to grammars: whether they do, what drafting brings, and what grammars cost.

    moa-serve & python tools/measure_grammar.py schemas --server ws://127.0.0.1:8765 --temperature 0,1
    PYTHONPATH=tests python tools/measure_grammar.py identity --engine onnx --count 1000
    python tools/measure_grammar.py cost
    moa-serve & python tools/measure_grammar.py hostile --server ws://127.0.0.1:8765

``schemas`` asks for an answer to each of 200 schemas, without drafts, with the device's, with drafts of a device that
does not know the grammar, and with the side that is faster; the answers must conform, and be the same each time.
``identity`` compares answers with drafts of a tiny target, over links that go away, with its own choices token by
token. ``cost`` times the engine's
steps for eight sessions with and without grammars. ``hostile`` times an answer beside another client, which asks for
answers without a grammar, then with one that was made to take long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from grammar_schemas import SchemaMaker
from moa_runtime.bundle import Bundle
from moa_runtime.chat import Chat
from moa_runtime.drafters.factory import backend_for, drafter_for
from moa_runtime.events import AnswerFinished, FinishReason
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.options import Drafting, LoopSettings
from moa_runtime.paths import default_bundle
from moa_runtime.session.events import AnswerSampling, Grammar, Sampling
from moa_runtime.transport import Endpoint

SEED = 20261128
#: Grammars that were made to take long.
HOSTILE = {
    "exponential": Grammar("regex", "(a|b)*a(a|b){20}[a-z ]{2000}"),
    "ambiguous": Grammar("lark", 'start: start start | /[a-z ]/ | ""'),
    "recursive": Grammar("lark", 'start: "(" start ")" | "[" start "]" | /[a-z]/ start'),
    "counted": Grammar("regex", "((a{1,100}){1,100}){1,100}"),
    "wide": Grammar("json_schema", json.dumps({"properties": {f"p{n}": {"type": "integer"} for n in range(3500)}})),
    "1 MB": Grammar("regex", "a" * (1 << 20)),
}


async def answer_of(chat: Chat, question: str, count: int, sampling: Sampling) -> AnswerFinished:
    """Ask; return the end of the answer."""
    chat.restore([])
    *_, last = [event async for event in chat.send(question, max_new_tokens=count, sampling=sampling)]
    assert isinstance(last, AnswerFinished)
    return last


@contextlib.asynccontextmanager
async def chatting(
    options: argparse.Namespace, *, drafts: bool, knows: bool = True, drafting: Drafting = "device"
) -> AsyncIterator[Chat]:
    """Open a chat whose device drafts or not, and knows grammars or not."""
    bundle, where = Bundle.open(options.bundle), Endpoint(options.server)
    settings = LoopSettings(drafting=drafting, late_after_s=60.0)
    with contextlib.nullcontext() if knows else mock.patch("moa_runtime.grammar.compiler.has_llguidance", bool):
        drafter = drafter_for(bundle.manifest, backend_for(bundle, threads=options.threads)) if drafts else None
        async with Chat(bundle, where, drafter=drafter, settings=settings) as chat:
            await chat.open()
            yield chat


async def measure_schemas(options: argparse.Namespace) -> None:
    """Print a row for each temperature and kind of drafting."""
    import jsonschema

    maker = SchemaMaker(SEED)
    asked = [(schema, maker.question(schema)) for schema in (maker.schema() for _ in range(200))]
    asked = asked[:: max(1, 200 // options.count)][: options.count]
    kinds: dict[str, dict[str, Any]] = {
        "without drafts": {"drafts": False},
        "with drafts": {"drafts": True},
        "unmasked": {"drafts": True, "knows": False},
        "auto": {"drafts": True, "drafting": "auto"},
    }
    print("| temperature | drafts | answers | valid | cut | tokens | passes a token | ms a token | keys' share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for temperature in options.temperature:
        texts: dict[int, str] = {}
        for kind in options.kinds or kinds:
            tokens = passes = valid = cut = 0
            seconds, keys = 0.0, []
            async with chatting(options, **kinds[kind]) as chat:
                await answer_of(chat, "Hello", 8, Sampling())
                for number, (schema, question) in enumerate(asked):
                    grammar = Grammar("json_schema", json.dumps(schema))
                    sampling = Sampling(temperature, seed=number, grammar=grammar)
                    answer = await answer_of(chat, question, options.tokens, sampling)
                    figures = answer.statistics
                    tokens, passes = tokens + len(answer.tokens), passes + figures.rounds
                    seconds += figures.seconds - (figures.first_token_seconds or 0.0)
                    if answer.reason is FinishReason.LENGTH:
                        cut += 1
                    else:
                        jsonschema.validate(json.loads(answer.text), schema)
                        valid += 1
                        keys.append(_share_of_keys(chat, answer.text))
                    if texts.setdefault(number, answer.text) != answer.text:
                        print(
                            f"OTHER TEXT: schema {number}, {kind}: {answer.text!r}, not {texts[number]!r}", flush=True
                        )
            row = [temperature, kind, len(asked), f"{valid} of {len(asked) - cut}", cut, tokens]
            row += [f"{passes / tokens:.3f}", f"{1000 * seconds / tokens:.1f}", f"{statistics.median(keys):.2f}"]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def _share_of_keys(chat: Chat, text: str) -> float:
    """Return which part of an answer's tokens its keys are."""
    names: list[str] = []
    json.loads(text, object_pairs_hook=lambda pairs: names.extend(name for name, _ in pairs))
    count = sum(len(chat.tokenizer.encode(f'"{name}":')) for name in names)
    return count / len(chat.tokenizer.encode(text))


async def measure_identity(options: argparse.Namespace) -> None:
    """Compare answers; print the number of those that differ."""
    from moa_server.engine.load import load_local, prepare_vllm
    from moa_server.engine.torch_engine import load_torch_engine
    from moa_server.settings import Settings
    from support.server.running import serving
    from support.system import asking
    from support.system.asking import IMPATIENT, QUICK, constrained_decoding, ids, scheduled
    from support.tiny import make_tiny_bundle, make_tiny_drafter, make_tiny_target

    asking.TIMEOUT_S = 3600  # beside other work
    rng, differ, forced, offline, ended = random.Random(options.seed), 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = make_tiny_target(folder / "target", head_dim=32)  # which vLLM takes
        drafter = make_tiny_drafter(target, folder / "drafter")
        bundle = Bundle.open(make_tiny_bundle(folder / "bundle", target, drafter, "none", questions=()))
        load: Callable[..., Any] = load_local if options.engine == "onnx" else load_torch_engine
        if options.engine == "vllm":
            prepare_vllm(1)
            from moa_server.engine.vllm.engine import VllmEngine

            load = VllmEngine.load
        maker = SchemaMaker(options.seed)
        with serving(load(str(target), drafter), Settings(token="secret")) as verifier, contextlib.ExitStack():
            where = Endpoint(f"ws://127.0.0.1:{verifier.port}", "secret")
            for number in range(options.count):
                if number % 50 == 0:
                    drafting = ("device", "server", "auto")[number // 50 % 3]
                    settings = replace(QUICK, drafting=drafting, offline_limit=5, late_after_s=60.0)
                    chat = await Chat.connect(bundle, where, threads=1, settings=settings, timing=IMPATIENT)
                grammar = _random_grammar(rng, maker)
                sampling = Sampling(rng.choice([0.0, 0.7, 1.0]), seed=rng.randrange(1 << 32), grammar=grammar)
                chat.restore([])
                answer = await scheduled(chat, rng, count=options.tokens, sampling=sampling)
                forced += len(answer.tokens) - answer.statistics.rounds - answer.statistics.accepted
                offline += answer.statistics.offline
                ended += answer.reason is FinishReason.STOP
                if ids(answer) != await constrained_decoding(verifier, chat, answer, options.tokens, sampling):
                    differ += 1
                    print(f"DIFFERS: {number} {drafting} {sampling}", flush=True)
                if number % 50 == 49:
                    await chat.close()
                    print(f"{number + 1}: {differ} differ, {ended} complete, {offline} tokens offline", flush=True)


def _random_grammar(rng: random.Random, maker: SchemaMaker) -> Grammar:
    if rng.random() < 0.6:
        return Grammar("json_schema", json.dumps(maker.schema()))
    words = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 6))) for _ in range(4)]
    most = rng.randint(2, 30)
    regex = f"({words[0]}|{words[1]})[a-z ]{{1,{most}}}({words[2]}|{words[3]}[0-9]{{1,4}})"
    lark = f'start: "({words[0]}" start ")" | /[0-9]{{1,{most}}}/ | "{words[1]}" start'
    return rng.choice([Grammar("regex", regex), Grammar("lark", lark), Grammar("json_object")])


async def measure_cost(options: argparse.Namespace) -> None:
    """Print the milliseconds of a step of eight sessions, with and without grammars."""
    from moa_drafter.target_source import resolve_target
    from moa_server.engine.base import StepRequest, new_sequence
    from moa_server.engine.load import load_local

    engine = load_local(str(resolve_target(options.model)), None, threads=options.threads)
    assert engine.tokenizer_file is not None
    compiler = GrammarCompiler(engine.tokenizer_file, engine.vocab_size, engine.stop_tokens)
    compiler.distrust()  # as a server does
    maker, rng = SchemaMaker(SEED), random.Random(SEED)
    texts, prompts = (
        [list[int]() for _ in range(8)],
        [[rng.randrange(1000, 9000) for _ in range(100)] for _ in range(8)],
    )
    states = [compiler.compile(Grammar("json_schema", json.dumps(maker.schema()))) for _ in range(8)]
    sequences, seconds = [new_sequence() for _ in range(8)], {True: list[float](), False: list[float]()}
    for step in range(options.count):
        drafts = []
        for state, text in zip(states, texts, strict=True):  # four tokens that the grammar allows
            draft = list[int]()
            for _ in range(4):
                able = state.mask([*text, *draft]).nonzero()[0]
                draft.append(int(rng.choice(able)))
            drafts.append(draft)
        for constrained in (True, False) if step % 2 else (False, True):
            requests = [
                StepRequest(
                    sequence,
                    [*prompt, *text],
                    draft,
                    range(len(draft)),
                    AnswerSampling(
                        1.0,
                        seed=step,
                        answer_from=len(prompt),
                        state=state if constrained else None,
                        grammar=Grammar("json_object") if constrained else None,
                    ),
                )
                for sequence, prompt, text, draft, state in zip(sequences, prompts, texts, drafts, states, strict=True)
            ]
            began = time.perf_counter()
            outcomes = await engine.step(requests)
            if constrained:
                for text, draft, outcome, state in zip(texts, drafts, outcomes, states, strict=True):
                    state.allowed(text, draft, range(len(draft)))
                    state.forced([*text, *(draft[at] for at in outcome.path), outcome.token])
            seconds[constrained].append(time.perf_counter() - began)
        for place, (text, draft) in enumerate(zip(list(texts), drafts, strict=True)):
            new = [*text, draft[0]]
            texts[place] = [] if len(new) > 60 or draft[0] in engine.stop_tokens else new
    engine.close()
    with_ms, without_ms = (1000 * statistics.median(seconds[one][4:]) for one in (True, False))
    print("| sessions | draft | ms a step without grammars | with | ratio |\n| --- | --- | --- | --- | --- |")
    print(f"| 8 | 4 | {without_ms:.1f} | {with_ms:.1f} | {with_ms / without_ms:.3f} |")


async def measure_hostile(options: argparse.Namespace) -> None:
    """Print the milliseconds a token of an answer beside other ones."""

    async def beside(grammar: Grammar | None, done: asyncio.Event) -> None:
        async with chatting(options, drafts=False) as chat:
            while not done.is_set():
                with contextlib.suppress(Exception):
                    await answer_of(chat, "Hello", options.tokens, Sampling(1.0, grammar=grammar))

    print("| beside | ms a token | at most |\n| --- | --- | --- |", flush=True)
    async with chatting(options, drafts=True) as chat:
        for name, grammar in [("an answer without a grammar", None), *HOSTILE.items()]:
            done = asyncio.Event()
            other = asyncio.create_task(beside(grammar, done))
            await asyncio.sleep(1)
            answer = await answer_of(chat, "Write a story.", options.tokens, Sampling())
            done.set()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            trips = answer.statistics.round_trips
            print(
                f"| {name} | {1000 * answer.statistics.seconds / len(answer.tokens):.1f} | {1000 * max(trips):.0f} |",
                flush=True,
            )


MEASURES = {"schemas": measure_schemas, "identity": measure_identity, "cost": measure_cost, "hostile": measure_hostile}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--server", default="ws://127.0.0.1:8765")
    parser.add_argument("--bundle", type=Path, default=default_bundle())
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--engine", choices=("onnx", "torch", "vllm"), default="onnx")
    parser.add_argument("--count", type=int, default=200, help="schemas, triples or steps")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--temperature", type=lambda text: [float(one) for one in text.split(",")], default=[0.0, 1.0])
    parser.add_argument("--kinds", nargs="*", help="of drafting; all by default")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(MEASURES[options.measure](options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
