"""The contract of every drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class DraftToken:
    """One proposed token and the drafter's own log-probability of it (nats)."""

    token: int
    logprob: float


class Drafter(Protocol):
    """Proposes what follows a prefix. Keeps caches, but every call names its whole prefix, so there is
    nothing to roll back: a drafter drops by itself what no longer matches."""

    @property
    def rows(self) -> int:
        """Memory rows held, for positions ``0..rows-1``."""

    def add_rows(self, start: int, keys: Float32, values: Float32) -> None:
        """Store memory rows of committed tokens.

        Args:
            start: absolute position of the first row, at most :attr:`rows`; later rows held are replaced.
            keys, values: ``[n, kv_heads, head_dim]`` each.

        Raises:
            ValueError: a gap between the rows held and ``start``, or another shape.
        """

    def truncate_rows(self, length: int) -> None:
        """Forget the rows of positions ``length`` and above."""

    def draft(self, prefix: Sequence[int], count: int) -> list[DraftToken]:
        """Continue ``prefix``, the conversation's tokens from position 0, greedily by ``count`` tokens.

        Returns fewer when the context is full.
        """

    def lengthen(self, prefix: Sequence[int], logprob: float) -> list[DraftToken]:
        """What else to send with the draft that ends ``prefix``: tokens known without a step of the model, while they
        are worth verifying. Often none.

        Args:
            logprob: of the draft, all its tokens together (nats).
        """
