"""The Mixture of Attentions drafter on a device: a backend, and its caches."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.base import GREEDY, Budget, DraftToken, Float32
from moa_runtime.drafters.grammar_mask import GrammarMask
from moa_runtime.drafters.gumbel import NO_COUPLING, GumbelCoupling
from moa_runtime.drafters.ngram import LONGEST_SUFFIX, NgramMixture, worth_copying
from moa_runtime.drafters.tree_growth import GrowingTree
from moa_runtime.errors import MoaError
from moa_runtime.offline_stopping import StoppingRule
from moa_runtime.session.events import Sampling
from moa_runtime.session.tree import DraftTree
from moa_runtime.tokens import common_length

CATCH_UP_TOKENS = 512
_FIRST_CAPACITY = 256
_MORE_LIKELY_THAN_NOT = math.log(0.5)
_SURE = math.log(0.9)

_T = TypeVar("_T")
#: Work that yields each step of the device half, is sent its result, and returns a value.
Steps = Generator[StepInputs, StepResult, _T]


class MoaDrafter:
    """Drafts with the device half. Implements :class:`moa_runtime.drafters.base.Drafter`.

    The cache knows its tokens. Entries of tokens without a row may depend on the rows (they do if the device half ends
    with layers of the target), so they are computed again when rows change. Entries of tokens with a row are computed
    again only if they are made of rows that changed, see
    :attr:`moa_runtime.backends.base.Backend.entries_from_rows`.

    Args:
        backend: the device half.
        max_context: context of the target, tokens; no token is drafted after it, nor after the backend's positions.
        stop_tokens: ids that end a turn. One is drafted only if it is more likely than not, because a wrong one ends
            the text that the device writes offline.
        mixture: mixed into the backend's candidates, if any.
        stopping_rule: rule by which it stops writing offline, if any.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_context: int,
        stop_tokens: Collection[int] = (),
        mixture: NgramMixture | None = None,
        stopping_rule: StoppingRule | None = None,
    ) -> None:
        self.stopping_rule = stopping_rule
        self._backend = backend
        self._stop_tokens, self._mixture = frozenset(stop_tokens), mixture
        self._coupling, self._mask = NO_COUPLING, GrammarMask(GREEDY, ())
        self._max_context = max_context if backend.max_positions is None else min(max_context, backend.max_positions)
        self._cached: list[int] = []
        self._cache = GrowingRows(backend.kv_shape, heads_first=backend.heads_first)
        self._memory = GrowingRows(backend.row_shape)
        self._rows_of_cache = 0  # number of rows that the cache was computed with
        self._rows_kept = 0  # number of these, from the first on, that have not changed since

    @property
    def rows(self) -> int:
        """Number of memory rows held, for positions ``0..rows-1``."""
        return self._memory.length

    @property
    def needs_rows(self) -> bool:
        """See :attr:`moa_runtime.drafters.base.Drafter.needs_rows`."""
        return self._backend.needs_a_row

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """See :meth:`moa_runtime.drafters.base.Drafter.add_rows`."""
        self._memory.write(start, keys, values)
        self._rows_kept = min(self._rows_kept, start)

    def truncate_rows(self, length: int) -> None:
        """Drop the memory rows from position ``length`` on."""
        self._memory.truncate(length)
        self._rows_kept = min(self._rows_kept, self.rows)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """Draft a chain of the likeliest tokens, or a tree level by level, and copies of the mixture after both.

        Copies take no step. They continue a chain while it is ``worth_copying``, a tree while they are among its
        likeliest nodes. Nor do tokens that a grammar forces. See :meth:`moa_runtime.drafters.base.Drafter.propose`.

        Raises:
            ValueError: if the prefix is empty.
            MoaError: if the backend computes NaN.
        """
        steps = self.steps(prefix, budget, sampling)
        try:
            inputs = next(steps)
            while True:
                inputs = steps.send(self._backend.step(inputs))
        except StopIteration as ended:
            tree: DraftTree = ended.value
            return tree

    def steps(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> Steps[DraftTree]:
        """Do the same, but leave the steps to the caller, who may compute those of several drafters at once."""
        if not prefix:
            raise ValueError("cannot draft from an empty prefix")
        depth = min(budget.depth, self._max_context - len(prefix))
        if depth < 1 or budget.nodes < 1:
            return DraftTree()
        if self._mixture is not None:
            self._mixture.confirm(prefix[: len(prefix) - budget.tentative])
        self._coupling, stem = GumbelCoupling(sampling), GrammarMask(sampling, prefix).forced()
        stem = stem[: min(depth, budget.nodes)]
        prefix, depth, nodes = [*prefix, *stem], depth - len(stem), budget.nodes - len(stem)
        if depth < 1 or nodes < 1 or not self._stop_tokens.isdisjoint(stem):
            return DraftTree.chain(stem, [0.0] * len(stem))
        self._mask = GrammarMask(sampling, prefix)
        budget = replace(budget, nodes=nodes, depth=depth, levels=min(budget.levels, depth))
        if budget.branches and not budget.levels and (few := self._mask.few()):
            return self._guessed(prefix, few, budget).prepended(stem, [0.0] * len(stem))
        grow = self._tree if budget.branches and budget.levels else self._chain
        return (yield from grow(prefix, budget)).prepended(stem, [0.0] * len(stem))

    def _guessed(self, text: list[int], few: list[DraftToken], budget: Budget) -> DraftTree:
        """Draft those of few allowed tokens that pay, and after them what takes no step either."""
        if self._mixture is not None:
            few = self._mask.left(self._mixture.mix(few, text), ())
        tree, tail = GrowingTree(budget, self._stop_tokens), text[-LONGEST_SUFFIX:]
        [candidates] = self._coupling.ranked([few], len(text))
        worth = [candidate for candidate in candidates if budget.sends(candidate.logprob)]
        if not worth:
            return DraftTree()
        tree.add_level([worth], stepped=False)
        tree.lengthen(lambda path: self._without_steps(path, tail, len(text) - len(tail)), budget.depth - 1)
        return tree.best()

    def _chain(self, text: list[int], budget: Budget) -> Steps[DraftTree]:
        start, memory = len(text), self._memory_of(len(text))
        logprobs: list[float] = []
        steps: list[int] = []
        room, levels = min(budget.depth, budget.nodes), min(budget.levels, budget.nodes)
        ended = False
        while levels and len(logprobs) < room and not ended and (not logprobs or budget.continued([sum(logprobs)])):
            token = self._surely_copied(text, text[start:])
            if token is None:
                token = self._best((yield from self._catch_up(text, memory)), text, text[start:])
                steps.append(1)
            if token is None:
                break
            text.append(token.token)
            logprobs.append(token.logprob)
            levels -= 1
            sure = self._mask.forced(text[start:])[: room - len(logprobs)]
            text += sure
            logprobs += [0.0] * len(sure)
            ended = text[-1] in self._stop_tokens
        if not ended:
            logprob = sum(logprobs)
            path, tail = text[start:], text[max(0, start - LONGEST_SUFFIX) : start]
            for token in islice(self._without_steps(path, tail, start - len(tail)), room - len(logprobs)):
                logprob += token.logprob
                if not worth_copying(budget, logprob):
                    break
                text.append(token.token)
                logprobs.append(token.logprob)
        return DraftTree.chain(text[start:], logprobs, steps)

    def _tree(self, text: list[int], budget: Budget) -> Steps[DraftTree]:
        tree, length, levels = GrowingTree(budget, self._stop_tokens), len(text), budget.levels
        if self._backend.max_positions is not None:
            levels = min(levels, 1 + (self._backend.max_positions - length) // budget.width)
        if levels < 1:
            return tree.best()
        memory = self._memory_of(length)
        tree.add_level(self._candidates((yield from self._catch_up(text, memory)), text, [[]]))
        while tree.depth < levels:
            paths, path_mask = tree.expand()
            if not paths:
                break
            # Their cache entries follow those of the prefix while the tree grows.
            new, earlier = path_mask.shape[0], path_mask.shape[1] - path_mask.shape[0]
            result = yield StepInputs(
                np.array([path[-1] for path in paths], np.int64),
                np.full(new, length + tree.depth - 1, np.int64),
                np.arange(new, dtype=np.int64),
                *self._cache.first(length + earlier),
                np.concatenate((np.ones((new, length), np.bool_), path_mask), axis=1),
                *memory,
            )
            self._cache.write(length + earlier, result.keys, result.values)
            tree.add_level(self._candidates(result, text, paths))
        self._cache.truncate(length)
        tail = text[-LONGEST_SUFFIX:]
        tree.lengthen(lambda path: self._without_steps(path, tail, length - len(tail)), budget.depth - tree.depth)
        return tree.best()

    def _catch_up(self, prefix: Sequence[int], memory: tuple[Float32, Float32]) -> Steps[StepResult]:
        """Feed the tokens of ``prefix`` that the cache lacks; return the result for its last token."""
        # The last token is fed again even if it is cached: its query predicts the next one.
        keep = min(common_length(self._cached, prefix), len(prefix) - 1)
        self._forget_from(keep)
        for start in range(keep, len(prefix), CATCH_UP_TOKENS):
            result = yield from self._feed(prefix[start : start + CATCH_UP_TOKENS], memory)
        return result

    def _feed(self, tokens: Sequence[int], memory: tuple[Float32, Float32]) -> Steps[StepResult]:
        """Run a step over tokens that follow the cached ones, with a query at the last; extend the cache."""
        held = len(self._cached)
        # In the target's own layers a row replaces its token, so no row may be of a later token.
        keys, values = (part[: held + len(tokens)] for part in memory)
        result = yield StepInputs.chain(tokens, self._cache.first(held), (keys, values))
        self._cache.write(held, result.keys, result.values)
        self._cached += tokens
        return result

    def _memory_of(self, positions: int) -> tuple[Float32, Float32]:
        # Rows after the prefix belong to tokens that the draft is to predict.
        held = min(self._memory.length, positions)
        kept = min(self._rows_kept, held)
        if not kept == held == self._rows_of_cache:
            self._forget_from(kept if self._backend.entries_from_rows else held)
            self._rows_of_cache = self._rows_kept = held
        if held == 0 and self._backend.needs_a_row:
            # A softmax needs one row. A row of zeros adds nothing to the residual, and the target's own layers mask it.
            zero = np.zeros((1, *self._backend.row_shape), np.float32)
            return zero, zero
        return self._memory.first(held)

    def _forget_from(self, length: int) -> None:
        del self._cached[length:]
        self._cache.truncate(length)

    def _without_steps(self, path: list[int], tail: list[int], before: int) -> Iterator[DraftToken]:
        """Yield the tokens after a path of the draft that take no step, until none is known, which may be never:
        copies, and those that the grammar forces.

        Args:
            tail: last tokens of the text before the path.
            before: number of tokens of the text before these.
        """
        if not self._mask.on:
            if self._mixture is not None:
                yield from self._mixture.copies(tail + path, self._coupling, before)
            return
        path, copies = list(path), self._mixture
        while not (path and path[-1] in self._stop_tokens):
            sure = [DraftToken(token, 0.0) for token in self._mask.forced(path)]
            if not sure and copies is not None:
                text = [*tail, *path]
                followers = copies.followers(text[-LONGEST_SUFFIX:], before + len(text), self._coupling)
                sure = self._mask.left(followers, path)[:1]
            if not sure:
                return
            for token in sure:
                path.append(token.token)
                yield token

    def _surely_copied(self, text: Sequence[int], path: Sequence[int]) -> DraftToken | None:
        """Return a copy that is likely enough to replace a step of the model, if any."""
        copy = self._mixture.copy(text, self._coupling) if self._mixture is not None else None
        return copy if copy is not None and copy.logprob > _SURE and self._mask.left([copy], path) else None

    def _best(self, result: StepResult, text: list[int], path: Sequence[int]) -> DraftToken | None:
        """Return the likeliest candidate; None if the grammar allows none."""
        (candidates,) = self._candidates(result, text, [[]], path)
        likely = (c for c in candidates if c.token not in self._stop_tokens or c.logprob > _MORE_LIKELY_THAN_NOT)
        return next(likely, candidates[0] if candidates else None)

    def _candidates(
        self, result: StepResult, text: list[int], paths: Sequence[Sequence[int]], stem: Sequence[int] = ()
    ) -> list[list[DraftToken]]:
        """Return the candidates of each query, best first, after ``text`` and its path; all paths have one length.

        Args:
            stem: end of the text that belongs to the draft.
        """
        if np.isnan(result.top_logprobs).any():  # sorting them would fail far from here
            raise MoaError(
                "the drafter computes no numbers, so its weights or its graph are broken: check it with moa-export "
                "verify BUNDLE; export it again from another checkpoint, or draft with --drafter sssd",
                code="not_finite",
            )
        ranked = [
            [DraftToken(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
            for tokens, logprobs in zip(result.top_tokens.tolist(), result.top_logprobs.tolist(), strict=True)
        ]
        length, position, mixed = len(text), len(text) + len(paths[0]), []
        if self._mixture is None and not self._mask.on:
            return self._coupling.ranked(ranked, position)
        for candidates, path in zip(ranked, paths, strict=True):
            text += path  # in place: the text may be long
            some = candidates if self._mixture is None else self._mixture.mix(candidates, text)
            mixed.append(self._mask.left(some, [*stem, *path], best=True))
            del text[length:]
        return self._coupling.ranked(mixed, position)


class GrowingRows:
    """Keys and values of positions ``0..length-1`` in arrays that double when full.

    The valid part is a prefix of each array, so it reaches the backend without a copy.

    Args:
        kv_shape: ``(kv_heads, head_dim)``.
        heads_first: order in memory, see :attr:`moa_runtime.backends.base.Backend.heads_first`.
    """

    def __init__(self, kv_shape: tuple[int, int], *, heads_first: bool = False) -> None:
        self.length = 0
        self._heads_first = heads_first
        self._keys, self._values = (self._zeros(_FIRST_CAPACITY, kv_shape) for _ in range(2))

    def write(self, start: int, keys: Float32, values: Float32) -> None:
        """Write rows from position ``start`` on; those held from there on are dropped.

        Raises:
            ValueError: if there is a gap before ``start``, or the shape is not ``[n, kv_heads, head_dim]``.
        """
        expected = (len(keys), *self._keys.shape[1:])
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"rows have shapes {keys.shape} and {values.shape}, expected {expected}")
        if not 0 <= start <= self.length:
            raise ValueError(f"rows start at position {start}, but only {self.length} are held: a gap")
        stop = start + len(keys)
        if stop > len(self._keys):
            capacity = max(stop, 2 * len(self._keys))
            self._keys, self._values = (self._grown(part, capacity) for part in (self._keys, self._values))
        for part, new in ((self._keys, keys), (self._values, values)):
            place = part[start:stop]
            if place.ctypes.data != new.ctypes.data:  # or the backend wrote them there
                place[:] = new
        self.length = stop

    def truncate(self, length: int) -> None:
        """Drop the rows from position ``length`` on."""
        self.length = max(0, min(self.length, length))

    def first(self, count: int) -> tuple[Float32, Float32]:
        """Return views of the first ``count`` keys and values, ``[count, kv_heads, head_dim]`` each."""
        return self._keys[:count], self._values[:count]

    def _grown(self, array: Float32, capacity: int) -> Float32:
        larger = self._zeros(capacity, array.shape[1:])
        larger[: self.length] = array[: self.length]
        return larger

    def _zeros(self, capacity: int, kv_shape: tuple[int, ...]) -> Float32:
        heads, size = kv_shape
        if self._heads_first:
            return np.zeros((heads, capacity, size), np.float32).transpose(1, 0, 2)
        return np.zeros((capacity, heads, size), np.float32)
