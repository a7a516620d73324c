"""Grammars are compiled one after the other before answers begin."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from moa_chat.gateway.grammar_queue import GrammarQueue
from moa_runtime.grammar.matcher import MOST_BYTES
from moa_runtime.session.events import Grammar
from support.chat.pooled_chat import parse
from support.refusals import refused

TOKENIZER = SimpleNamespace(thought=lambda thinking: "", special_tokens=lambda marks: {})


class Compiler:
    """Compiles until it is told to end."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.ends = asyncio.Event()

    def knows(self, grammar: Grammar) -> bool:
        return grammar.text == "known"

    async def compiled(self, grammar: Grammar) -> None:
        self.begun.append(grammar.text)
        try:
            await (asyncio.sleep(0) if self.knows(grammar) else self.ends.wait())
        except asyncio.CancelledError:
            self.cancelled.append(grammar.text)
            raise


def test_a_few_grammars_wait_and_others_are_refused_at_once():
    async def run() -> None:
        compiler = Compiler()
        queue = GrammarQueue(compiler, lambda: TOKENIZER, most=2)  # type: ignore[arg-type]

        def asking(regex: str) -> asyncio.Task[None]:
            return asyncio.create_task(queue.compile(parse(guided_regex=regex)))

        waiting = [asking("a"), asking("b"), asking("b")]
        await asyncio.sleep(0)
        with refused("rate_limit_exceeded"):
            await queue.compile(parse(guided_regex="c"))
        await queue.compile(parse(guided_regex="known"))
        await queue.compile(parse())
        waiting[0].cancel()  # its client has left
        await asyncio.wait(waiting[:1])
        waiting.append(asking("c"))
        await asyncio.sleep(0)
        assert compiler.begun == ["a", "b", "b", "known", "c"] and compiler.cancelled == ["a"]
        compiler.ends.set()
        await asyncio.gather(*waiting[1:])

    asyncio.run(run())


def test_a_grammar_that_is_too_large_does_not_wait():
    async def run() -> None:
        compiler = Compiler()
        queue = GrammarQueue(compiler, lambda: TOKENIZER)  # type: ignore[arg-type]
        with refused("too_large"):
            await queue.compile(parse(guided_regex="a" * (MOST_BYTES + 1)))
        assert compiler.begun == []

    asyncio.run(run())
