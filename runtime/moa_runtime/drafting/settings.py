"""What a host may say to the drafting loop."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.drafting.offline import OFFLINES, Offline
from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTINGS, Drafting


@dataclass(frozen=True)
class LoopSettings:
    """Limits of the drafting loop.

    Attributes:
        offline_limit: tentative tokens written at most without the target.
        late_after_s: a draft's verdict that takes longer is late: the device writes on alone.
        prefill_late_after_s: the same for a prompt's verdict.
        outage_after_s: a link that is down for longer is an outage: what was written since the last frame is offline
            text.
        drafting: who drafts while the link is up, see :class:`~moa_runtime.drafting.drafter_selection.Placement`.
        offline: what writes while there is no verifier.

    Raises:
        MoaError: a negative number, or another word for who drafts or writes.
    """

    offline_limit: int = 256
    late_after_s: float = 2.0
    prefill_late_after_s: float = 6.0
    outage_after_s: float = 1.0
    drafting: Drafting = "auto"
    offline: Offline = "writer"

    def __post_init__(self) -> None:
        words = {"drafting": DRAFTINGS, "offline": OFFLINES}
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise MoaError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name, value in vars(self).items():
            if name not in words and not value >= 0:
                raise MoaError(f"{name} must be 0 or more, not {value}")


@dataclass(frozen=True)
class Conditions:
    """What the host knows of the device. See ``docs/embedding.md``.

    Attributes:
        background: nobody looks: nothing is drafted or asked for until that is over.
        low_power: the model takes no steps: drafts are copies only, and nothing is written alone.
        metered: bytes cost money: the server sends no memory rows, so drafts are copies only.
    """

    background: bool = False
    low_power: bool = False
    metered: bool = False
