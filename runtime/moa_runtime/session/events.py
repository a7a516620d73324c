"""What a client session tells the application."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moa_runtime.session.sampling import Sampling

__all__ = [
    "Cause",
    "Committed",
    "Decided",
    "Echoed",
    "Faulted",
    "FinishReason",
    "Finished",
    "Origin",
    "Policy",
    "Resumed",
    "RolledBack",
    "RowsReceived",
    "Sampling",
    "SessionEvent",
    "Welcomed",
]


class Origin(enum.Enum):
    """Where a token of an answer came from."""

    DRAFTED = "drafted"  # written by the device while online, confirmed by the target
    OFFLINE = "offline"  # written by the device without the target
    CORRECTED = "corrected"  # chosen by the target itself: a correction, a bonus token, or pushed
    KEPT = "kept"  # written offline, and kept by the user's policy without asking the target


class Policy(enum.Enum):
    """What becomes of tokens written offline when the target comes back."""

    ROLLBACK = "rollback"  # they stay up to the first disagreement with the target
    KEEP = "keep"  # they stay, whatever the target would have written
    ASK = "ask"  # as ROLLBACK, and the application hears of the disagreement and may keep them after all


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


class Cause(enum.Enum):
    """Why a verdict came."""

    ASKED = "asked"  # a Prompt or Draft was sent for it on this connection
    PUSHED = "pushed"  # the server went on by itself, within the credit
    FETCHED = "fetched"  # it followed the Welcome: decided before this connection


@dataclass(frozen=True)
class Welcomed:
    """The link is up.

    Attributes:
        resumed: whether the server still knew the conversation.
        drafts: whether the server drafts too, while it goes on by itself.
    """

    resumed: bool
    drafts: bool = False


@dataclass(frozen=True)
class Echoed:
    """The server has taken the frame with this stamp, and held it for so many seconds before it answered."""

    stamp: int
    held_s: float


@dataclass(frozen=True)
class RowsReceived:
    """New memory rows for the drafter: ``keys, values [n, kv_heads, head_dim]`` from position ``start``."""

    start: int
    keys: NDArray[np.float32]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Decided:
    """A verdict was taken up; what it changed follows.

    Attributes:
        supplied: tokens of the Prompt that it answers, 0 for a Draft.
        drafted: tokens of the Draft that it answers; of a pushed one, those that the server drafted.
        accepted: of them.
        compute_s: seconds that the target took.
        draft_s: seconds that the server's own draft took, for a verdict that was pushed.
        drafts_wanted: the verifier is busy, and asks the device to draft.
        sharing: conversations that share the target, this one included; 1 where the verifier does not say it.
    """

    cause: Cause
    supplied: int
    drafted: int
    accepted: int
    compute_s: float
    draft_s: float = 0.0
    drafts_wanted: bool = False
    sharing: int = 1


@dataclass(frozen=True)
class Committed:
    """Answer tokens that became final, in order, from absolute position ``start``; none where a late verdict brought
    nothing but what the policy ``KEEP`` overrules."""

    start: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class RolledBack:
    """Tentative tokens that were dropped, from absolute position ``start`` on."""

    start: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Finished:
    """The answer ended."""

    reason: FinishReason


@dataclass(frozen=True)
class Faulted:
    """The server refused something, or sent what cannot be understood.

    Attributes:
        code: name of a ``FaultCode`` without its prefix, such as ``"CONTEXT_FULL"``.
        retry_after_ms: when trying again may help; 0 for never.
    """

    code: str
    text: str
    retry_after_ms: int


@dataclass(frozen=True)
class Resumed:
    """The server is given ``replayed`` tokens of the conversation again: it lost them."""

    replayed: int


SessionEvent = Welcomed | Echoed | RowsReceived | Decided | Committed | RolledBack | Finished | Faulted | Resumed
