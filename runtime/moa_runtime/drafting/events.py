"""Orders of the drafting loop to its host, and events for its listeners."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, PauseReason
from moa_runtime.session.events import Origin, Sampling, SessionEvent


@dataclass(frozen=True)
class Draft:
    """Order: call ``by.propose(prefix, budget, sampling)``, then :meth:`DraftingLoop.drafted`.

    Attributes:
        by: the drafter, or the writer during an outage.
        prefix: the conversation's tokens, tentative ones included.
        origin: of the drafted tokens.
        sampling: how the target will choose, and how the device writes offline.
    """

    by: Drafter
    prefix: list[int]
    budget: Budget
    origin: Origin
    sampling: Sampling


@dataclass(frozen=True)
class Wait:
    """Order: wait until something happens, or until ``until`` (seconds of the loop's clock; None for no limit)."""

    until: float | None = None


@dataclass(frozen=True)
class Drafted:
    """The device drafted for ``seconds``, or the origins of tentative tokens changed."""

    seconds: float


@dataclass(frozen=True)
class RoundEnded:
    """A frame was answered.

    Attributes:
        supplied: tokens of a prompt, or lost ones that were sent again; 0 for a draft's verdict.
        drafted: tokens of the draft, a chain or a tree.
        depth: tokens on its longest path.
        accepted: drafted tokens that the target chose, too.
        steps: nodes that each step of the device's model continued for this draft.
        draft_s: seconds that drafting took.
        waited_s: seconds from sending to the verdict.
        compute_s: seconds of the target's pass, as the server reports them; None for a shadow draft.
        sharing: sessions that share the target, this one included.
        scores: the drafter's log-probability (nats) of its likeliest path up to each token.
    """

    supplied: int
    drafted: int
    depth: int
    accepted: int
    steps: tuple[int, ...]
    draft_s: float
    waited_s: float
    compute_s: float | None
    sharing: int = 1
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pushed:
    """A verdict arrived while the server streamed on its own.

    Attributes:
        drafted, accepted: tokens that the server drafted, and how many of them the target chose.
        waited_s: seconds since the verdict before.
        compute_s: seconds of the target's pass, as the server reports them.
        sharing: as in :class:`RoundEnded`.
    """

    drafted: int
    accepted: int
    waited_s: float
    compute_s: float
    sharing: int = 1


@dataclass(frozen=True)
class LinkLost:
    """An established connection is gone."""


@dataclass(frozen=True)
class PauseBegan:
    """The device cannot write on for now."""

    reason: PauseReason


@dataclass(frozen=True)
class Problem:
    """Something went wrong; ``final`` if waiting cannot mend it."""

    error: MoaError
    final: bool


LoopEvent = SessionEvent | Drafted | RoundEnded | Pushed | LinkChanged | LinkLost | PauseBegan | Problem
