"""Which controller a draft length means."""

from __future__ import annotations

from moa_runtime.control import Controller, FixedShape
from moa_runtime.draft_length import DraftLength
from moa_runtime.drafters.base import Budget
from moa_runtime.thompson import BetaThompson, CalibratedThompson
from moa_runtime.throughput import Throughput


def controller_for(length: DraftLength) -> Controller:
    """A new one for a conversation: chains of that length, or as the word says."""
    if isinstance(length, int):
        return FixedShape(Budget.chain(length))
    adaptive: dict[str, type[Throughput | BetaThompson | CalibratedThompson]] = {
        "auto": Throughput,
        "thompson": BetaThompson,
        "thompson-calibrated": CalibratedThompson,
    }
    return adaptive[length]()
