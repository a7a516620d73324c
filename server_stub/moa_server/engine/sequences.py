"""The engine's sequences: which tokens each holds, and rooms for them in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from moa_server.engine.kv_cache import Room, RoomShape, rounded_up

#: Tokens that a new room has beyond those that are needed at once.
_SLACK = 64


@dataclass
class SequenceState:
    """One sequence: ``tokens`` are processed, their keys and values in the first slots of ``room``."""

    tokens: list[int] = field(default_factory=list)
    room: Room | None = None

    @property
    def capacity(self) -> int:
        """Tokens of the room."""
        return 0 if self.room is None else self.room.capacity


class Sequences:
    """States by the caller's numbers, the least recently used first.

    Methods called during a step run in the engine's thread; :meth:`release` and :meth:`agreed` may come from another.

    Args:
        bound: tokens that all rooms together may hold; a multiple of 64.
    """

    def __init__(self, shape: RoomShape, bound: int) -> None:
        self._shape, self.bound = shape, bound
        self._states: dict[int, SequenceState] = {}

    @property
    def tokens_taken(self) -> int:
        """Tokens that all rooms hold or could hold."""
        return sum(state.capacity for state in tuple(self._states.values()))

    def release(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._states.clear()

    def agreed(self, number: int, prefix: Sequence[int]) -> int:
        """How many tokens at the beginning of ``prefix`` the sequence holds."""
        state = self._states.get(number)
        return 0 if state is None else _agreed(state.tokens, prefix)

    def opened(self, number: int, prefix: Sequence[int]) -> SequenceState:
        """The state of a sequence, now the most recently used, cut where it does not agree with ``prefix``."""
        state = self._states.pop(number, None) or SequenceState()
        self._states[number] = state
        agreed = _agreed(state.tokens, prefix)
        if agreed < len(prefix):
            del state.tokens[agreed:]
        return state

    def need(self, number: int, tokens: int) -> int:
        """What the room of a sequence takes of the bound, once it can hold ``tokens``."""
        state = self._states.get(number)
        return max(rounded_up(tokens), 0 if state is None else state.capacity)

    def make_rooms(self, tokens: Mapping[int, int]) -> None:
        """Let sequences, given by number, have rooms for so many tokens; others lose theirs where memory is short.

        Raises:
            ValueError: they need more than the bound together, see :meth:`need`.
        """
        reserved = sum(self.need(number, count) for number, count in tokens.items())
        if reserved > self.bound:
            raise ValueError(f"sequences that need {reserved} tokens do not fit into a cache of {self.bound}")
        for number, count in tokens.items():
            reserved -= self.need(number, count)
            self._make_room(self._states[number], count, tokens, reserved)
            reserved += self.need(number, count)

    def _make_room(self, state: SequenceState, tokens: int, staying: Collection[int], reserved: int) -> None:
        """A room for one of those ``staying``, the others of which need ``reserved`` together."""
        room = state.room
        if room is not None and tokens <= room.capacity:
            return
        least = rounded_up(tokens)
        wanted = least + _SLACK if room is None else max(least, rounded_up(room.capacity + room.capacity // 4))
        evictable = {number: other for number, other in tuple(self._states.items()) if number not in staying}
        free = self.bound - reserved - sum(other.capacity for other in evictable.values())
        for number, other in evictable.items():
            if free >= wanted:
                break
            free += other.capacity
            self.release(number)
        capacity = min(wanted, free)
        state.room = Room(self._shape, capacity) if room is None else room.resized(capacity, len(state.tokens))


def _agreed(held: list[int], prefix: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(held), len(prefix))
    # Nearly always all of it; comparing slices is a thousand times faster than token by token.
    if held[:length] == list(prefix[:length]):
        return length
    return next(index for index in range(length) if held[index] != prefix[index])
