"""The caches of all sequences, and the blocks that they share, within a bound; the least recently used are evicted.

Shared blocks are tokens that several conversations begin with, such as a system prompt or an agent's tools. As in
vLLM's automatic prefix caching, a block is known by a hash of its tokens and of all before them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moa_runtime.tokens import common_length
from moa_server.engine.target_pass import BLOCK, Cache, rounded_up

#: Tokens of a new cache beyond those needed at once.
_SLACK = 64


def block_keys(owner: str, tokens: Sequence[int], known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Yield the key of each whole block of ``tokens``.

    Args:
        owner: conversations of different owners share nothing, so that no answer time reveals another owner's prompts.
        known: keys of the first blocks.
    """
    yield from known
    key = known[-1] if known else hashlib.sha256(owner.encode()).digest()
    for start in range(BLOCK * len(known), len(tokens) - BLOCK + 1, BLOCK):
        key = hashlib.sha256(key + np.array(tokens[start : start + BLOCK], np.int64).tobytes()).digest()
        yield key


class PrefixBlocks:
    """Copies of the states of blocks, see :meth:`moa_server.engine.target_pass.Cache.block_states`."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[str, Any]] = {}  # with their owners, the least recently used first
        self._owned: Counter[str] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return BLOCK * len(self._blocks)

    def add(self, owner: str, key: bytes, states: Any) -> None:
        """Take a block that is not there yet."""
        self._blocks[key] = owner, states
        self._owned[owner] += 1

    def use(self, key: bytes) -> Any:
        """Return the states of a block that is there."""
        self._blocks[key] = self._blocks.pop(key)
        return self._blocks[key][1]

    def evict(self) -> None:
        """Drop the least recently used block of the owner that has the most."""
        [(most, _)] = self._owned.most_common(1)
        key = next(key for key, (owner, _) in self._blocks.items() if owner == most)
        del self._blocks[key]
        self._owned[most] -= 1

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self._owned.clear()


@dataclass
class SequenceState:
    """One sequence: ``tokens`` are processed, their keys and values in the first slots of ``cache``.

    Attributes:
        keys: of its leading blocks that were looked for or stored among those that conversations share.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Cache | None = None
    keys: list[bytes] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Tokens of the cache."""
        return 0 if self.cache is None else self.cache.capacity

    def cut(self, length: int) -> None:
        """Drop the tokens from ``length`` on."""
        del self.tokens[length:]
        del self.keys[length // BLOCK :]


class SequenceCaches:
    """Sequences with their caches, by the caller's numbers, the least recently used first.

    Sequences that have an owner (:meth:`share`) share the blocks of tokens that they begin with. Those blocks take what
    the caches leave of the bound.

    Methods called during a step run in the engine's thread; :meth:`release`, :meth:`share` and :meth:`held` may come
    from another.

    Args:
        new_cache: makes an empty cache for a number of tokens.
        bound: most tokens of all caches together; a multiple of 64.
    """

    def __init__(self, new_cache: Callable[[int], Cache], bound: int) -> None:
        self._new_cache, self._bound = new_cache, bound
        self._states: dict[int, SequenceState] = {}
        self._owners: dict[int, str] = {}
        self._blocks = PrefixBlocks()
        #: Tokens that were taken from shared blocks so far.
        self.tokens_reused = 0

    @property
    def tokens_taken(self) -> int:
        """Tokens of all caches, by their capacity, and of the shared blocks."""
        return sum(state.capacity for state in tuple(self._states.values())) + self._blocks.tokens

    def share(self, number: int, owner: str) -> None:
        """Let a sequence share its first blocks with the others of an owner."""
        self._owners[number] = owner

    def release(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)
        self._owners.pop(number, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._states.clear()
        self._owners.clear()
        self._blocks.clear()

    def held(self, number: int, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of ``prefix`` the sequence holds or finds among shared blocks."""
        state = self._states.get(number)
        agreed = 0 if state is None else common_length(state.tokens, prefix)
        return agreed if agreed == len(prefix) else max(agreed, BLOCK * len(self._found(number, prefix, agreed)))

    def __getitem__(self, number: int) -> SequenceState:
        return self._states[number]

    def open(self, number: int, prefix: Sequence[int]) -> None:
        """Make a sequence the most recently used one, and cut it to agree with ``prefix``."""
        state = self._states.pop(number, None) or SequenceState()
        self._states[number] = state
        agreed = common_length(state.tokens, prefix)
        if agreed < len(prefix):
            state.cut(agreed)

    def need(self, number: int, tokens: int) -> int:
        """Return the share of the bound that the cache of a sequence takes once it can hold ``tokens``."""
        state = self._states.get(number)
        return max(rounded_up(tokens), 0 if state is None else state.capacity)

    def allocate(self, tokens: Mapping[int, int]) -> None:
        """Give each sequence a cache for its number of tokens; evict others if memory is short. Together they
        :meth:`need` at most the bound."""
        reserved = sum(self.need(number, count) for number, count in tokens.items())
        for number, count in tokens.items():
            state = self._states[number]
            cache, least = state.cache, rounded_up(count)
            if least <= state.capacity:
                continue
            wanted = least + _SLACK if cache is None else max(least, rounded_up(cache.capacity + cache.capacity // 4))
            reserved -= least
            evictable = {key: other for key, other in tuple(self._states.items()) if key not in tokens}
            free = self._bound - reserved - sum(other.capacity for other in evictable.values())
            for key, other in evictable.items():
                if free >= wanted:
                    break
                free += other.capacity
                del self._states[key]
            size = min(wanted, free)
            state.cache = self._new_cache(size) if cache is None else cache.resized(size, len(state.tokens))
            reserved += state.capacity

    def reuse(self, number: int, prefix: Sequence[int]) -> None:
        """Take the next blocks of ``prefix`` from those that are shared, if there are any; the cache can hold it."""
        state = self._states[number]
        found = self._found(number, prefix, len(state.tokens))
        if state.cache is None or BLOCK * len(found) <= len(state.tokens):
            return
        first = len(state.tokens) // BLOCK
        for index, key in list(enumerate(found))[first:]:
            state.cache.set_block_states(index, self._blocks.use(key))
        self.tokens_reused += min(BLOCK * len(found), len(prefix) - 1) - len(state.tokens)  # the last one is computed
        state.tokens[first * BLOCK :] = prefix[first * BLOCK : BLOCK * len(found)]
        state.keys = found

    def keep_blocks(self, numbers: Iterable[int]) -> None:
        """Store copies of the whole blocks of sequences that share, after a step."""
        while self._blocks.tokens and self.tokens_taken > self._bound:  # caches have grown
            self._blocks.evict()
        for number in numbers:
            state, owner = self._states[number], self._owners.get(number)
            count = len(state.tokens) // BLOCK
            if owner is None or state.cache is None or len(state.keys) >= count:
                continue
            stored, state.keys = len(state.keys), list(block_keys(owner, state.tokens, state.keys))
            for index, key in enumerate(state.keys):
                if index < stored or key in self._blocks:
                    continue
                if self.tokens_taken + BLOCK > self._bound:
                    if not self._blocks.tokens:
                        break
                    self._blocks.evict()
                self._blocks.add(owner, key, state.cache.block_states(index))

    def _found(self, number: int, prefix: Sequence[int], held: int) -> list[bytes]:
        """Keys of the leading blocks of ``prefix`` that are shared with the sequence, if they reach beyond ``held``
        tokens."""
        owner, state = self._owners.get(number), self._states.get(number)
        if owner is None or not self._blocks.tokens or len(prefix) // BLOCK <= held // BLOCK:
            return []
        known = [] if state is None else state.keys[: held // BLOCK]
        return list(itertools.takewhile(self._blocks.__contains__, block_keys(owner, prefix, known)))
