"""Sequences in vLLM: the tokens that each holds, and the progress of its request. Pure: tokens in, decisions out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from moa_runtime.tokens import common_length
from moa_server.engine.base import StepRequest


class Move(Enum):
    """How to bring a request of vLLM to a prefix."""

    #: It holds all of it.
    NOTHING = auto()
    #: The prefix is what it holds and the token that it chose last: a draft can be verified.
    GO_ON = auto()
    #: Its last tokens are replaced, and more follow.
    REWRITE = auto()
    #: Another request takes its place. What both begin with is found in vLLM's cache, but for part of a block.
    ANEW = auto()


@dataclass
class HeldSequence:
    """One sequence.

    Attributes:
        name: of vLLM's request.
        tokens: that are processed.
        chosen: the token after them, which the next step processes; None if it is to be replaced.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    chosen: int | None = None

    def move(self, prefix: Sequence[int], block: int, *, choosing: bool) -> tuple[Move, int]:
        """Return the move to ``prefix``, and the number of tokens that stay.

        ::

            >>> held = HeldSequence("r", [5, 6, 7], chosen=8)
            >>> held.move([5, 6, 7, 8], 2, choosing=True)
            (<Move.GO_ON: 2>, 3)
            >>> held.move([5, 6, 9], 2, choosing=True)     # the block [5, 6] stays as it is
            (<Move.REWRITE: 3>, 2)
            >>> held.move([5, 9], 2, choosing=True)        # in the middle of a block that is full
            (<Move.ANEW: 4>, 0)

        Args:
            block: tokens of a block. One that is full may belong to several sequences.
            choosing: whether a token is chosen after the prefix: its last token is then processed in any case.
        """
        agreed = common_length(self.tokens, prefix)
        if not choosing and agreed == len(prefix):
            return Move.NOTHING, len(self.tokens)
        if agreed == len(self.tokens) == len(prefix) - 1 and self.chosen == prefix[-1]:
            return Move.GO_ON, agreed
        keep = min(agreed, len(prefix) - 1)
        if keep and keep >= len(self.tokens) // block * block:
            return Move.REWRITE, keep
        return Move.ANEW, 0


class HeldSequences:
    """All sequences by the caller's numbers, the least recently used first."""

    def __init__(self) -> None:
        self._held: dict[int, HeldSequence] = {}
        self._named = 0

    def __len__(self) -> int:
        return len(self._held)

    def agreed(self, number: int, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of ``prefix`` are processed."""
        held = self._held.get(number)
        return 0 if held is None else common_length(held.tokens, prefix)

    def use(self, number: int) -> HeldSequence | None:
        """Return the sequence, now the most recently used; None if it is not held."""
        held = self._held.pop(number, None)
        if held is not None:
            self._held[number] = held
        return held

    def begin(self, number: int) -> HeldSequence:
        """Start an empty sequence with a new name."""
        self._held.pop(number, None)
        self._named += 1
        held = self._held[number] = HeldSequence(f"{number}.{self._named}")
        return held

    def forget(self, number: int) -> str | None:
        """Forget a sequence; return the name of its request, which the caller drops, or None."""
        held = self._held.pop(number, None)
        return None if held is None else held.name

    def oldest(self, staying: Collection[int]) -> Iterator[int]:
        """Return the sequences to evict if memory is short: all but ``staying``, the least recently used first."""
        return iter([number for number in self._held if number not in staying])


class RequestProgress:
    """One request. vLLM may need several of its own steps for it: for a long prefix, or a draft that does not fit into
    one. What comes back either is the next token of the draft or ends it, so it does not matter how it was cut.

    Attributes:
        draft: tokens that are still to be verified.
        accepted: how many were.
        token: the target's choice after them.
        done: whether nothing is left to do.
    """

    def __init__(self, request: StepRequest, held: HeldSequence, *, done: bool = False) -> None:
        self.request, self.held, self.done = request, held, done
        self.draft = list(request.draft)
        self.accepted = 0
        self.token: int | None = None

    @property
    def processed(self) -> list[int]:
        """Tokens that the sequence holds once all is done."""
        return [*self.request.prefix, *self.request.draft[: self.accepted]]

    def take(self, tokens: Sequence[int]) -> None:
        """Take the result of one of vLLM's steps: the accepted tokens, and the choice after them."""
        if self.request.sampling is None:
            self.held.tokens, self.held.chosen, self.done = list(self.request.prefix), None, True
            return
        for token in tokens:
            if not self.draft or token != self.draft[0]:
                self.token, self.done = token, True
                self.held.tokens, self.held.chosen = self.processed, token
                return
            del self.draft[0]
            self.accepted += 1
