"""The engine's sequences: which tokens each holds, and rooms for them in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from moa_server.rooms import BLOCK, Room, RoomShape, rounded_up

#: Tokens that a new room has beyond those that are needed at once.
_SLACK = 64


@dataclass
class SequenceState:
    """One sequence: ``tokens`` are processed, their keys and values in the first slots of ``room``."""

    tokens: list[int] = field(default_factory=list)
    room: Room | None = None


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
        return sum(state.room.capacity for state in tuple(self._states.values()) if state.room is not None)

    def release(self, number: int) -> None:
        """Forget a sequence."""
        self._states.pop(number, None)

    def agreed(self, number: int, prefix: Sequence[int]) -> int:
        """How many tokens at the beginning of ``prefix`` the sequence holds."""
        state = self._states.get(number)
        return 0 if state is None else _agreed(state.tokens, prefix)

    def opened(self, number: int, prefix: Sequence[int]) -> SequenceState:
        """The state of a sequence, which becomes the most recently used, cut where it does not agree with ``prefix``."""
        state = self._states.pop(number, None) or SequenceState()
        self._states[number] = state
        agreed = _agreed(state.tokens, prefix)
        if agreed < len(prefix):
            del state.tokens[agreed:]
        return state

    def room_for(self, state: SequenceState, tokens: int, staying: Collection[int]) -> Room:
        """A room in which ``state`` can hold ``tokens``; others than ``staying`` lose theirs where memory is short.

        Raises:
            ValueError: more tokens than the bound lets ``state`` and ``staying`` hold together.
        """
        room = state.room
        if room is not None and tokens <= room.capacity:
            return room
        least = rounded_up(tokens)
        wanted = least + _SLACK if room is None else max(least, rounded_up(room.capacity + room.capacity // 4))
        free = self.bound - self.tokens_taken + (0 if room is None else room.capacity)
        for number, other in tuple(self._states.items()):
            if free >= wanted:
                break
            if number not in staying and other is not state and other.room is not None:
                free += other.room.capacity
                self.release(number)
        if free < least:
            raise ValueError(f"{tokens} tokens do not fit into a cache of {self.bound}")
        capacity = min(wanted, free // BLOCK * BLOCK)
        state.room = Room(self._shape, capacity) if room is None else room.grown(capacity, len(state.tokens))
        return state.room


def _agreed(held: list[int], prefix: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = min(len(held), len(prefix))
    # Nearly always all of it; comparing slices is a thousand times faster than token by token.
    if held[:length] == list(prefix[:length]):
        return length
    return next(index for index in range(length) if held[index] != prefix[index])
