"""The state of a grammar along an answer: the tokens that may follow, for each node of a draft too."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moa_runtime.tokens import common_length

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.bool_]

#: Most forced tokens that are committed at once; more follow with the next verdict.
MOST_FORCED = 64
#: Processor seconds after which a draft is checked no further, and forced tokens are left to the next verdict: a token
#: of an ambiguous grammar takes milliseconds. Text depends on neither.
DRAFT_S = 0.01
#: Processor seconds in which :meth:`AnswerMatcher.read` returns.
READ_S = 0.05
#: Most answers for which the limit that they met is remembered.
_PROBLEMS = 64
#: How llguidance's reasons begin if the lexer met a limit.
_OF_LEXER = "lexer error"


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """Return the mask that allows these tokens alone: bool ``[vocab_size]``."""
    mask = np.zeros(vocab_size, np.bool_)
    mask[list(tokens)] = True
    return mask


def unpacked(bits: bytes, vocab_size: int) -> Mask:
    """Return bits, the lowest of a byte first, as a mask: bool ``[vocab_size]``."""
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little", count=max(vocab_size, 8 * len(bits)))
    return found.astype(np.bool_)[:vocab_size]


class AnswerMatcher:
    """Implements :class:`moa_runtime.session.events.GrammarState`.

    Every call names the whole answer so far, so the state synchronises itself, also after a rewind or a resume: what
    no longer matches is rolled back, what is missing is consumed. One thread at a time has it. llguidance's matcher
    cannot go back after it met a limit: a copy from before the newest tokens takes its place, as reading a whole answer
    again could take seconds. But copies share the lexer, and with it a limit that it met on another path, as of a
    draft: it counts only if a newly compiled matcher meets it, too.

    Args:
        matcher: of the grammar, nothing consumed.
        compile_again: makes another that shares nothing with it.
        vocab_size: tokens of the target's vocabulary.
        stop_tokens: those that end an answer; the grammar allows them where it may end.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        compile_again: Callable[[], LLMatcher],
        vocab_size: int,
        stop_tokens: Collection[int],
    ) -> None:
        self._fresh, self._matcher, self._compile_again = matcher, matcher.deep_copy(), compile_again
        self._vocab_size, self._stop_tokens = vocab_size, frozenset(stop_tokens)
        self._consumed: list[int] = []
        self._kept = self._fresh, 0  # the matcher after that many of the consumed tokens; never used itself
        self._refused: list[int] = []  # beginning of an answer that the grammar does not allow; empty for none known
        self._limit = ""  # met by it; no text if it violates the grammar
        self._problems: dict[tuple[int, ...], str] = {}  # by answer
        self._endings = np.packbits(mask_of(self._stop_tokens, vocab_size), bitorder="little").tobytes()
        self._ends = int.from_bytes(self._endings, "little")
        self._lock = threading.Lock()

    def read(self, answer: Sequence[int]) -> bool:
        """Consume the tokens of an answer for at most :data:`READ_S`; return whether no more are to be read."""
        with self._lock:
            return not self._sync(answer, time.thread_time() + READ_S) or len(self._consumed) == len(self._text(answer))

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
            bits = self._bits(answer)
        return unpacked(bits, self._vocab_size)

    def bits(self, answer: Sequence[int]) -> bytes:
        """Return what :meth:`mask` does as bits, token 0 in the lowest of the first byte."""
        with self._lock:
            return self._bits(answer)

    def among(self, answer: Sequence[int], tokens: Sequence[int]) -> tuple[list[bool], int]:
        """Return of each of ``tokens`` whether it may follow, and how many tokens may. Faster than :meth:`mask`."""
        with self._lock:
            bits = self._bits(answer)
        return [bool(bits[token >> 3] >> (token & 7) & 1) for token in tokens], int.from_bytes(
            bits, "little"
        ).bit_count()

    def problem(self, answer: Sequence[int]) -> str:
        """Return the limit that :meth:`mask` met after ``answer``, or that was met while it was read; else no text."""
        with self._lock:
            refused = self._refused and list(answer[: len(self._refused)]) == self._refused
            return self._limit if refused else self._problems.get(tuple(answer), "")

    def allowed(self, answer: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return, for each token of a tree after the answer, whether the grammar allows the path to it.

        Those that :data:`DRAFT_S` does not suffice for count as not allowed.
        """
        found, children = [False] * len(tokens), [list[int]() for _ in range(len(tokens) + 1)]
        for index, parent in enumerate(parents):
            children[parent].append(index)
        with self._lock:
            if not self._stop_tokens.isdisjoint(answer) or not self._sync(answer):
                return found
            matcher, path, until = self._matcher.deep_copy(), list[int](), time.thread_time() + DRAFT_S
        waiting = children[0][::-1]
        while waiting and time.thread_time() < until:
            index = waiting.pop()
            depth = path.index(parents[index]) + 1 if parents[index] else 0
            matcher.rollback(len(path) - depth)
            del path[depth:]
            if tokens[index] in self._stop_tokens:
                found[index] = matcher.is_accepting()
            elif matcher.try_consume_tokens([tokens[index]]):
                found[index] = True
                path.append(index + 1)
                waiting += children[index + 1][::-1]
            elif matcher.is_error():
                break  # a limit
        return found

    def forced(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that must follow, one after the other, because nothing else may: at most
        :data:`MOST_FORCED`, as many as :data:`DRAFT_S` suffices for, and none after one that ends the answer."""
        forced: list[int] = []
        with self._lock:
            until = time.thread_time() + DRAFT_S
            while len(forced) < MOST_FORCED and not (forced and forced[-1] in self._stop_tokens):
                able = int.from_bytes(self._bits([*answer, *forced]), "little")
                if able.bit_count() != 1:
                    break
                forced.append(able.bit_length() - 1)
                if time.thread_time() > until:
                    break
        return forced

    def _bits(self, answer: Sequence[int]) -> bytes:
        known = self._problems and tuple(answer) in self._problems
        if known or not self._stop_tokens.isdisjoint(answer) or not self._sync(answer):
            return self._endings
        bits, problem = self._matcher.compute_bitmask(), self._matcher.get_error()
        if problem.startswith(_OF_LEXER):
            if not self._sync(answer, renew=True):
                return self._endings
            bits, problem = self._matcher.compute_bitmask(), self._matcher.get_error()
        if problem:
            self._go_back()
        else:
            able = int.from_bytes(bits, "little")
            if able & self._ends and not self._matcher.is_accepting():  # a grammar may name one within its text
                bits = (able & ~self._ends).to_bytes(len(bits), "little")
            if bits.strip(b"\0"):
                return bits
        if len(self._problems) >= _PROBLEMS:
            self._problems.clear()
        self._problems[tuple(answer)] = problem or "no token may follow"
        return self._endings

    def _sync(self, answer: Sequence[int], until: float = math.inf, *, renew: bool = False) -> bool:
        """Let the matcher, with ``renew`` a newly compiled one, have consumed the answer, or what it consumes until a
        time of the thread's clock; return whether the grammar allows it."""
        wanted = self._text(answer)
        if self._refused and wanted[: len(self._refused)] == self._refused:
            return False
        refused = None if renew else self._consume(wanted, until)
        if renew or (refused is not None and self._limit_met().startswith(_OF_LEXER)):
            self._fresh = self._compile_again()
            self._matcher, self._kept = self._fresh.deep_copy(), (self._fresh, 0)
            self._consumed.clear()
            refused = self._consume(wanted, until, masked=True)
        if refused is not None:
            self._refused, self._limit = [*self._consumed, refused], self._limit_met()
            if self._limit:
                self._go_back()
            return False
        return len(wanted) == len(answer) or len(self._consumed) < len(wanted) or self._matcher.is_accepting()

    def _consume(self, wanted: Sequence[int], until: float, *, masked: bool = False) -> int | None:
        """Consume what is missing; return the token that the matcher does not take.

        Args:
            masked: compute each token's mask before it. What a mask found costs the lexer nothing later, so only then
                is a limit met as late as if the answer had been chosen by this matcher.
        """
        common = common_length(self._consumed, wanted)
        back = len(self._consumed) - common
        if back and not self._matcher.rollback(back):
            self._matcher, common = self._fresh.deep_copy(), 0
        del self._consumed[common:]
        if back or common < len(wanted):
            self._kept = self._matcher.deep_copy(), common
        for token in wanted[common:]:  # no other thread of Python runs while one is consumed
            if masked:
                self._matcher.compute_bitmask()
            if not self._matcher.try_consume_tokens([token]):
                return token
            self._consumed.append(token)
            if until < math.inf and time.thread_time() > until:
                break
        return None

    def _limit_met(self) -> str:
        """Return the limit for which the matcher refused a token; no text if the grammar does not allow it."""
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # one whose lexer has met a limit says so only here
        return str(self._matcher.get_error())

    def _go_back(self) -> None:
        """Replace a matcher that met a limit."""
        matcher, length = self._kept
        self._matcher = matcher.deep_copy()
        del self._consumed[length:]

    def _text(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first that ends an answer."""
        text = list(tokens)
        if not self._stop_tokens.isdisjoint(text):
            del text[next(at for at, token in enumerate(text) if token in self._stop_tokens) :]
        return text
