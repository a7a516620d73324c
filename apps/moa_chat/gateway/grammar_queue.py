"""The queue of grammars that are compiled before their answers begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moa_chat.gateway.errors import RETRY_LATER, ApiError
from moa_chat.gateway.requests import AnswerRequest
from moa_runtime.grammar.after_reasoning import after_reasoning
from moa_runtime.grammar.compiler import GrammarCompiler
from moa_runtime.grammar.matcher import check_size
from moa_runtime.reasoning import CLOSE, OPEN
from moa_runtime.session.events import Grammar
from moa_runtime.tokenizer import ChatTokenizer


class GrammarQueue:
    """Compiles the grammars of requests, one after the other in the compiler's thread, before the verifier has them.

    So a grammar that does not compile costs the verifier nothing. A request that is cancelled leaves the queue, and
    answers without grammars always have places left, because only some requests may wait here.

    Args:
        tokenizer: returns the target's.
        most: how many different grammars may wait; half of a pool's places.
    """

    def __init__(self, compiler: GrammarCompiler, tokenizer: Callable[[], ChatTokenizer], most: int = 4) -> None:
        self._compiler, self._tokenizer, self._most = compiler, tokenizer, most
        self._waiting: Counter[Grammar] = Counter()  # requests by their grammars

    async def compile(self, request: AnswerRequest) -> None:
        """Compile what the request's answers conform to, if anything.

        Raises:
            ApiError: too many others wait (429).
            GrammarError: it does not compile, or exceeds the limits.
        """
        if (grammar := self._grammar(request)) is None:
            return
        check_size(grammar)
        if not self._compiler.knows(grammar) and grammar not in self._waiting and len(self._waiting) >= self._most:
            text = f"at most {self._most} new grammars are compiled at once: try again later"
            raise ApiError(429, text, code="rate_limit_exceeded", headers=RETRY_LATER)
        self._waiting[grammar] += 1
        try:
            await self._compiler.compiled(grammar)
        finally:
            self._waiting[grammar] -= 1
            self._waiting += Counter()  # without those that are zero

    def _grammar(self, request: AnswerRequest) -> Grammar | None:
        """Return the grammar as a chat sends it."""
        if request.raw or request.sampling.grammar is None:
            return request.sampling.grammar
        tokenizer = self._tokenizer()
        special = tokenizer.special_tokens((OPEN, CLOSE))
        return after_reasoning(request.sampling, tokenizer.thought(request.thinking), special).grammar
