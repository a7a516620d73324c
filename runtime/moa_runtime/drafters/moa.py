"""The Mixture of Attentions drafter on a device: a backend, and its caches."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from moa_runtime.backends.base import Backend, StepInputs, StepResult
from moa_runtime.drafters.base import GREEDY, Budget, DraftToken, Float32
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


class MoaDrafter:
    """Drafts with the device half. Implements :class:`moa_runtime.drafters.base.Drafter`.

    The cache remembers which tokens it holds. Entries of tokens without a row may depend on the rows there were (where
    the device half ends with layers of the target they do), so those are computed again when rows come or go. Entries
    of tokens with a row are computed again only where they are made of rows that came since, see
    :attr:`moa_runtime.backends.base.Backend.entries_from_rows`.

    Args:
        backend: the device half.
        max_context: positions the target can hold. No token is drafted beyond, nor beyond what the backend holds.
        stop_tokens: ids that end a turn. One is drafted only where it is more likely than not: a wrong guess
            would end what the device writes offline, and costs no more than another token online.
        mixture: what the backend's candidates are mixed with; None, and they are taken as they are.
        stopping_rule: when it stops where it writes alone; None, and it does not.
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
        self._coupling = NO_COUPLING
        self._max_context = max_context if backend.max_positions is None else min(max_context, backend.max_positions)
        self._cached: list[int] = []
        self._cache = GrowingRows(backend.kv_shape)
        self._memory = GrowingRows(backend.row_shape)
        self._rows_of_cache = 0  # how many the cache was computed with
        self._rows_kept = 0  # how many of them, from the first on, are held as they were then

    @property
    def rows(self) -> int:
        """Memory rows held, for positions ``0..rows-1``."""
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
        """Forget the memory rows of positions ``length`` and above."""
        self._memory.truncate(length)
        self._rows_kept = min(self._rows_kept, self.rows)

    def propose(self, prefix: Sequence[int], budget: Budget, sampling: Sampling = GREEDY) -> DraftTree:
        """A chain takes the likeliest token each time, a tree grows level by level. Copies, where a mixture knows some,
        go on behind both without a step: of a chain while all of it is likely enough (``worth_copying``), of a tree
        while they are among the likeliest nodes. See :meth:`moa_runtime.drafters.base.Drafter.propose`.

        Raises:
            ValueError: an empty prefix.
            MoaError: what the drafter computes is no number.
        """
        if not prefix:
            raise ValueError("cannot draft from an empty prefix")
        depth = min(budget.depth, self._max_context - len(prefix))
        if depth < 1 or budget.nodes < 1:
            return DraftTree()
        if self._mixture is not None:
            self._mixture.confirm(prefix[: len(prefix) - budget.tentative])
        self._coupling = GumbelCoupling(sampling)
        grow = self._tree if budget.branches and budget.levels else self._chain
        return grow(list(prefix), replace(budget, depth=depth, levels=min(budget.levels, depth)))

    def _chain(self, text: list[int], budget: Budget) -> DraftTree:
        start, memory = len(text), self._memory_of(len(text))
        logprobs: list[float] = []
        steps: list[int] = []
        levels = min(budget.levels, budget.nodes)
        ended = False
        while len(logprobs) < levels and not ended and (not logprobs or budget.continued([sum(logprobs)])):
            token = self._surely_copied(text)
            if token is None:
                token = self._best(self._catch_up(text, memory), text)
                steps.append(1)
            text.append(token.token)
            logprobs.append(token.logprob)
            ended = token.token in self._stop_tokens
        if self._mixture is not None and not ended:
            logprob = sum(logprobs)
            room = min(budget.depth, budget.nodes) - len(logprobs)
            for token in islice(self._mixture.copies(text, self._coupling), room):
                logprob += token.logprob
                if not worth_copying(budget, logprob):
                    break
                text.append(token.token)
                logprobs.append(token.logprob)
        return DraftTree.chain(text[start:], logprobs, steps)

    def _tree(self, text: list[int], budget: Budget) -> DraftTree:
        tree, length, levels = GrowingTree(budget, self._stop_tokens), len(text), budget.levels
        if self._backend.max_positions is not None:
            levels = min(levels, 1 + (self._backend.max_positions - length) // budget.width)
        if levels < 1:
            return tree.best()
        memory = self._memory_of(length)
        tree.add_level(self._candidates(self._catch_up(text, memory), text, [[]]))
        while tree.depth < levels:
            paths, path_mask = tree.expand()
            if not paths:
                break
            # Their cache entries lie behind those of the prefix for as long as the tree grows.
            new, earlier = path_mask.shape[0], path_mask.shape[1] - path_mask.shape[0]
            result = self._backend.step(
                StepInputs(
                    np.array([path[-1] for path in paths], np.int64),
                    np.full(new, length + tree.depth - 1, np.int64),
                    np.arange(new, dtype=np.int64),
                    *self._cache.first(length + earlier),
                    np.concatenate((np.ones((new, length), np.bool_), path_mask), axis=1),
                    *memory,
                )
            )
            self._cache.write(length + earlier, result.keys, result.values)
            tree.add_level(self._candidates(result, text, paths))
        self._cache.truncate(length)
        if self._mixture is not None:
            tail, copies, coupling = text[-LONGEST_SUFFIX:], self._mixture.copies, self._coupling
            before = length - len(tail)
            tree.lengthen(lambda path: copies(tail + path, coupling, before), budget.depth - tree.depth)
        return tree.best()

    def _catch_up(self, prefix: Sequence[int], memory: tuple[Float32, Float32]) -> StepResult:
        """Feed what the cache lacks of ``prefix``; what follows its last token."""
        # The last token is fed again even when cached: its query is what predicts the next one.
        keep = min(common_length(self._cached, prefix), len(prefix) - 1)
        self._forget_from(keep)
        for start in range(keep, len(prefix), CATCH_UP_TOKENS):
            result = self._feed(prefix[start : start + CATCH_UP_TOKENS], memory)
        return result

    def _feed(self, tokens: Sequence[int], memory: tuple[Float32, Float32]) -> StepResult:
        """One step over tokens that follow the cached ones, with a query at the last; extends the cache."""
        held = len(self._cached)
        # In the target's own layers a row stands in the place of its token, so no row is of a later one.
        keys, values = (part[: held + len(tokens)] for part in memory)
        result = self._backend.step(StepInputs.chain(tokens, self._cache.first(held), (keys, values)))
        self._cache.write(held, result.keys, result.values)
        self._cached += tokens
        return result

    def _memory_of(self, positions: int) -> tuple[Float32, Float32]:
        # Rows beyond the prefix belong to tokens that a draft would be predicting.
        held = min(self._memory.length, positions)
        kept = min(self._rows_kept, held)
        if not kept == held == self._rows_of_cache:
            self._forget_from(kept if self._backend.entries_from_rows else held)
            self._rows_of_cache = self._rows_kept = held
        if held == 0 and self._backend.needs_a_row:
            # A softmax needs one row. A zero row has a zero value, so it adds nothing to the residual. The target's
            # own layers, where it would take attention from the tokens, know it by its zeros.
            zero = np.zeros((1, *self._backend.row_shape), np.float32)
            return zero, zero
        return self._memory.first(held)

    def _forget_from(self, length: int) -> None:
        del self._cached[length:]
        self._cache.truncate(length)

    def _surely_copied(self, text: Sequence[int]) -> DraftToken | None:
        """A copy so likely that a step of the model is saved."""
        copy = self._mixture.copy(text, self._coupling) if self._mixture is not None else None
        return copy if copy is not None and copy.logprob > _SURE else None

    def _best(self, result: StepResult, text: list[int]) -> DraftToken:
        (candidates,) = self._candidates(result, text, [[]])
        likely = (c for c in candidates if c.token not in self._stop_tokens or c.logprob > _MORE_LIKELY_THAN_NOT)
        return next(likely, candidates[0])

    def _candidates(
        self, result: StepResult, text: list[int], paths: Sequence[Sequence[int]]
    ) -> list[list[DraftToken]]:
        """The candidates of each query, best first, which follow ``text`` and one of the paths behind it, all of the
        same length."""
        if np.isnan(result.top_logprobs).any():  # sorted and compared, they would fail far from here
            raise MoaError(
                "the drafter computes no numbers, so its weights or its graph are broken: moa-export verify BUNDLE "
                "tells; export it again from another checkpoint, or draft with --drafter sssd"
            )
        ranked = [
            [DraftToken(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
            for tokens, logprobs in zip(result.top_tokens.tolist(), result.top_logprobs.tolist(), strict=True)
        ]
        length, position, mixed = len(text), len(text) + len(paths[0]), []
        if self._mixture is None:
            return self._coupling.ranked(ranked, position)
        for candidates, path in zip(ranked, paths, strict=True):
            text += path  # in place: the text may be long
            mixed.append(self._mixture.mix(candidates, text))
            del text[length:]
        return self._coupling.ranked(mixed, position)


class GrowingRows:
    """Keys and values of positions ``0..length-1`` in arrays that double when full.

    The valid part is a prefix of each array, so it is contiguous and reaches the backend without a copy.

    Args:
        kv_shape: ``(kv_heads, head_dim)``.
    """

    def __init__(self, kv_shape: tuple[int, int]) -> None:
        self.length = 0
        self._keys = np.zeros((_FIRST_CAPACITY, *kv_shape), np.float32)
        self._values = np.zeros((_FIRST_CAPACITY, *kv_shape), np.float32)

    def write(self, start: int, keys: Float32, values: Float32) -> None:
        """Put rows at ``start``; what was held from there on is replaced.

        Raises:
            ValueError: a gap before ``start``, or another shape than ``[n, kv_heads, head_dim]``.
        """
        expected = (len(keys), *self._keys.shape[1:])
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"rows have shapes {keys.shape} and {values.shape}, expected {expected}")
        if not 0 <= start <= self.length:
            raise ValueError(f"rows start at position {start}, but only {self.length} are held: a gap")
        stop = start + len(keys)
        if stop > len(self._keys):
            capacity = max(stop, 2 * len(self._keys))
            self._keys = _grown(self._keys, self.length, capacity)
            self._values = _grown(self._values, self.length, capacity)
        self._keys[start:stop] = keys
        self._values[start:stop] = values
        self.length = stop

    def truncate(self, length: int) -> None:
        """Forget positions ``length`` and above."""
        self.length = max(0, min(self.length, length))

    def first(self, count: int) -> tuple[Float32, Float32]:
        """Views of the first ``count`` keys and values, ``[count, kv_heads, head_dim]`` each."""
        return self._keys[:count], self._values[:count]


def _grown(array: Float32, used: int, capacity: int) -> Float32:
    larger = np.zeros((capacity, *array.shape[1:]), np.float32)
    larger[:used] = array[:used]
    return larger
