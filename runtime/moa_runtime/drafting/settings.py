"""What a host may set in the drafting loop."""

from __future__ import annotations

from dataclasses import dataclass

from moa_runtime.errors import MoaError
from moa_runtime.options import DRAFTINGS, OFFLINES, Drafting, Offline


@dataclass(frozen=True)
class LoopSettings:
    """Limits of the drafting loop.

    Attributes:
        offline_limit: tokens written without the target, at most.
        late_after_s: seconds after which a draft's verdict is late and the device writes on alone.
        prefill_late_after_s: the same for a prompt's verdict.
        outage_after_s: seconds after which a link that is down is an outage: what was written since the last frame
            becomes offline text.
        drafting: the side that drafts while the link is up, see
            :class:`~moa_runtime.drafting.drafter_selection.DrafterSelection`.
        offline: what writes during an outage.

    Raises:
        MoaError: a number is negative, or ``drafting`` or ``offline`` is no word of :mod:`moa_runtime.options`.
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
    """What the host knows of the device, see "Conditions" in the client's documentation.

    Attributes:
        background: the app is not visible: nothing is drafted or asked for until it is.
        low_power: the model takes no steps: drafts are copies only, and nothing is written offline.
        metered: bytes cost money: the server sends no memory rows, so drafts are copies only.
    """

    background: bool = False
    low_power: bool = False
    metered: bool = False
