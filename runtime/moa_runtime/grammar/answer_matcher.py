"""The state of a grammar along an answer: the tokens that may follow, for each node of a draft too."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moa_runtime.session.tree import path_to
from moa_runtime.tokens import common_length

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]

#: Most forced tokens that are committed at once; more follow with the next verdict.
MOST_FORCED = 64
#: Most answers for which the limit that they met is remembered.
_PROBLEMS = 64


class AnswerMatcher:
    """Implements :class:`moa_runtime.session.events.GrammarState`.

    Every call names the whole answer so far, so the state synchronises itself, also after a rewind or a resume: what
    no longer matches is rolled back, what is missing is consumed. One thread at a time has it.

    Args:
        matcher: of the grammar, nothing consumed.
        vocab_size: tokens of the target's vocabulary.
        stop_tokens: those that end an answer; the grammar allows them where it may end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_tokens: Collection[int]) -> None:
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._vocab_size, self._stop_tokens = vocab_size, frozenset(stop_tokens)
        self._consumed: list[int] = []
        self._refused: list[int] = []  # beginning of an answer that the grammar does not allow; empty for none known
        self._problems: dict[tuple[int, ...], str] = {}  # by answer
        endings = np.zeros(8 * (-(-vocab_size // 8)), np.bool_)
        endings[list(self._stop_tokens)] = True
        self._endings = np.packbits(endings, bitorder="little").tobytes()
        self._lock = threading.Lock()

    def accepts(self, answer: Sequence[int]) -> bool:
        """Return whether an answer can begin with these tokens."""
        with self._lock:
            return self._sync(answer)

    def mask(self, answer: Sequence[int]) -> Mask:
        """Return the tokens that may follow, at least one: bool ``[vocab_size]``.

        After an answer that violates the grammar, or at a limit of llguidance, only those that end it; then
        :meth:`problem` says why.
        """
        with self._lock:
            bits = np.frombuffer(self._bits(answer), np.uint8)
        mask = np.unpackbits(bits, bitorder="little", count=max(self._vocab_size, 8 * len(bits))).astype(np.bool_)
        return mask[: self._vocab_size]

    def among(self, answer: Sequence[int], tokens: Sequence[int]) -> tuple[list[bool], int]:
        """Return of each of ``tokens`` whether it may follow, and how many tokens may. Faster than :meth:`mask`."""
        with self._lock:
            bits = self._bits(answer)
        return [bool(bits[token >> 3] >> (token & 7) & 1) for token in tokens], int.from_bytes(
            bits, "little"
        ).bit_count()

    def problem(self, answer: Sequence[int]) -> str:
        """Return the limit that :meth:`mask` met after ``answer``; else no text."""
        with self._lock:
            return self._problems.get(tuple(answer), "")

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return, for each token of a tree after the answer, whether the grammar allows the path to it."""
        found = [False] * len(tokens)
        with self._lock:
            if not self._sync(answer):
                return found
            for leaf in sorted(set(range(1, len(tokens) + 1)).difference(parents)):
                nodes = path_to(leaf, range(len(tokens)), parents)
                text = self._text([tokens[index] for index in nodes])
                count = self._matcher.validate_tokens(text)
                for index in nodes[: count + (count == len(text))]:  # and an end, which the mask will judge
                    found[index] = True
        return found

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that must follow, one after the other, because nothing else may: at most
        :data:`MOST_FORCED`, and none after one that ends the answer."""
        forced: list[int] = []
        with self._lock:
            while len(forced) < MOST_FORCED and not (forced and forced[-1] in self._stop_tokens):
                able = int.from_bytes(self._bits([*answer, *forced]), "little")
                if able.bit_count() != 1:
                    break
                forced.append(able.bit_length() - 1)
        return forced

    def _bits(self, answer: Sequence[int]) -> bytes:
        """Return the tokens that may follow as bits, token 0 in the lowest bit of the first byte."""
        if self._stop_tokens.isdisjoint(answer) and self._sync(answer):
            bits = self._matcher.compute_bitmask()
            if not self._matcher.is_error() and bits.strip(b"\0"):
                return bits
            if len(self._problems) >= _PROBLEMS:
                self._problems.clear()
            self._problems[tuple(answer)] = self._matcher.get_error() or "no token may follow"
        return self._endings

    def _sync(self, answer: Sequence[int]) -> bool:
        """Let the matcher have consumed the answer; return whether the grammar allows it."""
        wanted = self._text(answer)
        if self._refused and wanted[: len(self._refused)] == self._refused:
            return False  # a matcher that met a limit would read all of it again
        common = common_length(self._consumed, wanted)
        back = len(self._consumed) - common
        if self._matcher.is_error() or (back and not self._matcher.rollback(back)):
            self._matcher, common = self._fresh.deep_copy(), 0
        del self._consumed[common:]
        for at, token in enumerate(wanted[common:], common + 1):  # no other thread of Python runs while one is consumed
            if not self._matcher.try_consume_tokens([token]):
                self._refused = wanted[:at]
                return False
            self._consumed.append(token)
        return len(wanted) == len(answer) or self._matcher.is_accepting()

    def _text(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first that ends an answer."""
        text = list(tokens)
        if not self._stop_tokens.isdisjoint(text):
            del text[next(at for at, token in enumerate(text) if token in self._stop_tokens) :]
        return text
