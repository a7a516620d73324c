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
        origin: origin of the drafted tokens.
        sampling: sampling of the target, and of the device offline.
    """

    by: Drafter
    prefix: list[int]
    budget: Budget
    origin: Origin
    sampling: Sampling


@dataclass(frozen=True)
class Wait:
    """Order: wait for an event, or until ``until`` (seconds of the loop's clock; None for no limit)."""

    until: float | None = None


@dataclass(frozen=True)
class Drafted:
    """The device drafted, or the origins of tentative tokens changed.

    Attributes:
        seconds: time of drafting.
        unsolicited: number of tokens that were sent without being asked for, while the server streams.
    """

    seconds: float
    unsolicited: int = 0


@dataclass(frozen=True)
class RoundEnded:
    """A frame was answered.

    Attributes:
        supplied: number of tokens of a prompt, or of lost tokens sent again; 0 for a draft's verdict.
        drafted: number of tokens of the draft, a chain or a tree, or of the part that was verified.
        depth: number of tokens on its longest path.
        accepted: number of drafted tokens that the target accepted.
        steps: number of nodes that each step of the device's model continued for this draft.
        draft_s: time of drafting, seconds.
        waited_s: time from sending to the verdict, seconds.
        compute_s: time of the target's pass as reported by the server, seconds; None if the draft was not awaited.
        scores: the drafter's log-probability (nats) of its likeliest path up to each token.
        sent: number of tokens of the draft as it was sent; the server may have verified only a part of it.
    """

    supplied: int
    drafted: int
    depth: int
    accepted: int
    steps: tuple[int, ...]
    draft_s: float
    waited_s: float
    compute_s: float | None
    scores: tuple[float, ...] = ()
    sent: int = 0


@dataclass(frozen=True)
class Pushed:
    """A verdict arrived while the server streamed on its own.

    Attributes:
        drafted, accepted: number of drafted tokens that it verified, and of these that the target accepted.
        waited_s: time since the previous verdict, seconds.
        compute_s: as in :class:`RoundEnded`.
        draft_stamp: stamp of the unsolicited draft that was verified; 0 for the server's own draft, or none.
    """

    drafted: int
    accepted: int
    waited_s: float
    compute_s: float
    draft_stamp: int = 0


@dataclass(frozen=True)
class LinkLost:
    """An established connection is gone."""


@dataclass(frozen=True)
class PauseBegan:
    """The device cannot continue for now."""

    reason: PauseReason


@dataclass(frozen=True)
class Problem:
    """An error; ``final`` if waiting cannot resolve it."""

    error: MoaError
    final: bool


LoopEvent = SessionEvent | Drafted | RoundEnded | Pushed | LinkChanged | LinkLost | PauseBegan | Problem
