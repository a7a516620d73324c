"""Which controller a draft length means."""

from __future__ import annotations

from moa_runtime.draft_length import DraftLength
from moa_runtime.drafters.base import Budget
from moa_runtime.drafting.cost_model import Throughput
from moa_runtime.drafting.draft_controllers import Controller, FixedShape
from moa_runtime.drafting.thompson import BetaThompson, CalibratedThompson


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
