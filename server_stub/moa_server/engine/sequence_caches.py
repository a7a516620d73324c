"""The caches of all sequences within a bound; the least recently used ones are evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moa_runtime.tokens import common_length
from moa_server.engine.target_pass import Cache, rounded_up

#: Tokens of a new cache beyond those needed at once.
_SLACK = 64


@dataclass
class SequenceState:
    """One sequence: ``tokens`` are processed, their keys and values in the first slots of ``cache``."""

    tokens: list[int] = field(default_factory=list)
    cache: Cache | None = None

    @property
    def capacity(self) -> int:
        """Tokens of the cache."""
        return 0 if self.cache is None else self.cache.capacity


class SequenceCaches:
    """Sequences with their caches, by the caller's numbers, the least recently used first.

    Methods called during a step run in the engine's thread; :meth:`release` and :meth:`agreed` may come from another.

    Args:
        new_cache: makes an empty cache for a number of tokens.
        bound: most tokens of all caches together; a multiple of 64.
    """

    def __init__(self, new_cache: Callable[[int], Cache], bound: int) -> None:
        self._new_cache, self._bound = new_cache, bound
        self._states: dict[int, SequenceState] = {}

    @property
    def tokens_taken(self) -> int:
        """Capacity of all caches, in tokens."""
        return sum(state.capacity for state in tuple(self._states.values()))

    def release(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._states.clear()

    def agreed(self, number: int, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of ``prefix`` the sequence holds."""
        state = self._states.get(number)
        return 0 if state is None else common_length(state.tokens, prefix)

    def opened(self, number: int, prefix: Sequence[int]) -> SequenceState:
        """Return the state of a sequence, mark it most recently used, and cut it to agree with ``prefix``."""
        state = self._states.pop(number, None) or SequenceState()
        self._states[number] = state
        agreed = common_length(state.tokens, prefix)
        if agreed < len(prefix):
            del state.tokens[agreed:]
        return state

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
                self.release(key)
            size = min(wanted, free)
            state.cache = self._new_cache(size) if cache is None else cache.resized(size, len(state.tokens))
            reserved += state.capacity
