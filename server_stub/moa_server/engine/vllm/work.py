"""A request of a step while vLLM works on it. Pure: tokens that vLLM gives back in, a verdict out."""

from __future__ import annotations

from collections.abc import Sequence

from moa_server.engine.base import StepRequest
from moa_server.engine.vllm.sequences import HeldSequence


class Work:
    """One request. vLLM may need several of its own steps for it: for a long prefix, or a draft that does not fit into
    one. What comes back either is the next token of the draft or ends it, so it does not matter how it was cut.

    Attributes:
        draft: tokens that are still to be verified.
        accepted: how many were.
        token: the target's choice behind them.
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
        """What vLLM gave back in one of its steps: the tokens that it accepted, and its choice behind them."""
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
