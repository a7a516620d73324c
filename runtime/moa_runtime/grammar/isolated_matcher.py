"""The state of a stranger's grammar along an answer, in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from moa_runtime.grammar.answer_matcher import Mask, mask_of, unpacked
from moa_runtime.grammar.processes import GrammarProcess
from moa_runtime.tokens import common_length

#: What the system ended a process for.
_TOO_LONG = "it takes too long"


class IsolatedMatcher:
    """Implements :class:`moa_runtime.session.events.GrammarState` by an
    :class:`~moa_runtime.grammar.answer_matcher.AnswerMatcher` in another process.

    After the process has ended, an answer may only end.

    Args:
        process: of this answer alone.
        vocab_size, stop_tokens: see :class:`~moa_runtime.grammar.answer_matcher.AnswerMatcher`.
    """

    def __init__(self, process: GrammarProcess, vocab_size: int, stop_tokens: Collection[int]) -> None:
        self._process, self._lock = process, threading.Lock()
        self._vocab_size, self._stop_tokens = vocab_size, frozenset(stop_tokens)
        self._sent: list[int] = []  # the answer that the process knows

    def read(self, answer: Sequence[int]) -> bool:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.read`."""
        return bool(self._call(True, "read", answer))

    def accepts(self, answer: Sequence[int]) -> bool:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.accepts`."""
        return bool(self._call(False, "accepts", answer))

    def mask(self, answer: Sequence[int]) -> Mask:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.mask`."""
        bits = self._call(None, "bits", answer)
        return mask_of(self._stop_tokens, self._vocab_size) if bits is None else unpacked(bits, self._vocab_size)

    def among(self, answer: Sequence[int], tokens: Sequence[int]) -> tuple[list[bool], int]:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.among`."""
        ended = [token in self._stop_tokens for token in tokens], len(self._stop_tokens)
        found: tuple[list[bool], int] = self._call(ended, "among", answer, list(tokens))
        return found

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.allowed`."""
        found: list[bool] = self._call([False] * len(tokens), "allowed", answer, list(tokens), list(parents))
        return found

    def forced(self, answer: Sequence[int]) -> list[int]:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.forced`."""
        found: list[int] = self._call([], "forced", answer)
        return found

    def problem(self, answer: Sequence[int]) -> str:
        """See :meth:`moa_runtime.grammar.answer_matcher.AnswerMatcher.problem`."""
        return str(self._call(_TOO_LONG, "problem", answer))

    def _call(self, ended: Any, method: str, answer: Sequence[int], *arguments: object) -> Any:
        """Return what the process answers, and ``ended`` if it has ended."""
        with self._lock:
            wanted = list(answer)
            common = common_length(self._sent, wanted)
            try:
                found = self._process.ask((common, wanted[common:], method, arguments))
            except EOFError:
                return ended
            self._sent = wanted
            return found
