"""A request while the engine works on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moa_runtime.session.tree import chain
from moa_server.engine.base import StepRequest
from moa_server.engine.forward import Piece
from moa_server.engine.memory_rows import Span
from moa_server.engine.sequences import SequenceState


@dataclass
class StepWork:
    """A request during a step.

    Attributes:
        waiting: tokens of the prefix that are not processed yet.
        hidden: last hidden states behind the prefix and each draft token, once known.
    """

    request: StepRequest
    state: SequenceState
    waiting: list[int] = field(default_factory=list)
    hidden: Tensor | None = None

    @property
    def choosing(self) -> bool:
        return self.request.sampling is not None

    @property
    def rows_wanted(self) -> Span | None:
        """The tokens whose memory rows are wanted, once all are processed."""
        start, room = self.request.rows_from, self.state.room
        if start is None or room is None:
            return None
        return Span(room, start, len(self.state.tokens if self.choosing else self.request.prefix))

    def piece(self, part: list[int], draft: list[int]) -> Piece:
        """The next tokens of the prefix, and the draft or nothing, for a forward."""
        room, state, parents = self.state.room, self.state, self.request.parents
        assert room is not None
        if not parents or list(parents) == chain(len(draft)):
            return Piece(room, len(state.tokens), part + draft)
        if len(part) == 1 and state.tokens:  # the tree's root: one tile of attention in the place of two
            return Piece(room, len(state.tokens), (), part + draft, [0, *(1 + parent for parent in parents)])
        return Piece(room, len(state.tokens), part, draft, parents if draft else ())
