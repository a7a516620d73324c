"""Whatever happens to link, verifier and user, the text is the target's own, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.system.fuzz_schedule import schedule, shrunk


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(1000, 6000), marks=pytest.mark.slow)], ids=repr)
def test_the_text_is_the_targets_own_whatever_happens(small_bundle: Any, seeds: Iterable[int]) -> None:
    for seed in seeds:
        plan = schedule(seed)
        if failure := shrunk(plan, small_bundle):
            happenings, error = failure
            told = "\n".join(map(str, happenings))
            raise AssertionError(
                f"schedule {seed} fails with {type(error).__name__}: {error}\nof {plan.limits} and {plan.turns}\n"
                f"after these happenings:\n{told}"
            ) from error
