"""What the drafting loop asks of its host, and what it tells its listeners."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.drafters.base import Budget, Drafter
from moa_runtime.errors import MoaError
from moa_runtime.events import LinkChanged, PauseReason
from moa_runtime.session.events import Origin, Sampling, SessionEvent


@dataclass(frozen=True)
class Draft:
    """To be done next: ``by.propose(prefix, budget, sampling)``, then :meth:`drafted`.

    Attributes:
        by: the drafter, or what writes without a verifier.
        prefix: the conversation's tokens as the device sees it, tentative ones included.
        origin: of what is drafted.
        sampling: how the target will choose, and how the device writes alone.
    """

    by: Drafter
    prefix: list[int]
    budget: Budget
    origin: Origin
    sampling: Sampling


@dataclass(frozen=True)
class Wait:
    """Nothing is to be done before something happens, or before ``until`` (seconds of the loop's clock)."""

    until: float | None = None


@dataclass(frozen=True)
class Drafted:
    """The device drafted for so many seconds, or what is offline text among the tentative tokens changed."""

    seconds: float


@dataclass(frozen=True)
class RoundEnded:
    """A frame was answered.

    Attributes:
        supplied: tokens that the client gave: the user's turn, or lost ones. 0 for a draft's verdict.
        drafted: tokens sent to be verified, in a chain or a tree.
        depth: of them, on the longest path.
        accepted: of them.
        steps: nodes that each step of the model continued for this draft.
        draft_s: seconds that drafting took.
        waited_s: seconds from sending to the verdict.
        compute_s: of them, the target's, by its own account; None of a draft that was not sent.
        sharing: conversations that share the target, this one included.
        scores: log-probability of the draft's likeliest path up to each of its tokens, by the drafter (nats).
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
    """The server went on by itself, and said so in a verdict.

    Attributes:
        drafted, accepted: tokens that it drafted, and those of them that the target took.
        waited_s: seconds since the verdict before.
        compute_s: the target's, by its own account.
        sharing: as in :class:`RoundEnded`.
    """

    drafted: int
    accepted: int
    waited_s: float
    compute_s: float
    sharing: int = 1


@dataclass(frozen=True)
class LinkLost:
    """A connection that stood is gone."""


@dataclass(frozen=True)
class PauseBegan:
    """The device cannot write on for now."""

    reason: PauseReason


@dataclass(frozen=True)
class Problem:
    """Something went wrong; ``final`` where waiting cannot mend it."""

    error: MoaError
    final: bool


LoopEvent = SessionEvent | Drafted | RoundEnded | Pushed | LinkChanged | LinkLost | PauseBegan | Problem
