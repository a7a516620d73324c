"""What a host may say to the drafting loop."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.drafting import DRAFTINGS, Drafting
from moa_runtime.errors import MoaError


@dataclass(frozen=True)
class LoopSettings:
    """Limits of the drafting loop.

    Attributes:
        offline_limit: tentative tokens written at most without the target.
        late_after_s: a draft's verdict that takes longer is late: the device writes on alone.
        prefill_late_after_s: the same for a prompt's verdict.
        outage_after_s: a link that is down for longer is an outage: what was written since the last frame is offline
            text.
        drafting: who drafts while the link is up, see :class:`~moa_runtime.placement.Placement`.

    Raises:
        MoaError: a negative number, or another word for who drafts.
    """

    offline_limit: int = 256
    late_after_s: float = 2.0
    prefill_late_after_s: float = 6.0
    outage_after_s: float = 1.0
    drafting: Drafting = "auto"

    def __post_init__(self) -> None:
        if self.drafting not in DRAFTINGS:
            raise MoaError(f"drafting must be one of {', '.join(DRAFTINGS)}, not {self.drafting!r}")
        for name, value in vars(self).items():
            if name != "drafting" and not value >= 0:
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
