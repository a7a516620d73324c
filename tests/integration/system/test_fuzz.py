"""Whatever happens to link, verifier and user, the text is the target's own, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from support.system.fuzz_schedule import schedule, shrunk
from support.system.fuzz_world import toy_bundle


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return toy_bundle(tmp_path_factory.mktemp("toys"))


def run(seeds: Iterable[int], bundle: Any) -> None:
    for seed in seeds:
        plan = schedule(seed)
        failure = shrunk(plan, bundle)
        if failure is not None:
            happenings, error = failure
            told = "\n".join(map(str, happenings))
            raise AssertionError(
                f"schedule {seed} fails with {type(error).__name__}: {error}\nof {plan.limits} and {plan.turns}\n"
                f"after these happenings:\n{told}"
            ) from error


def test_the_text_is_the_targets_own_whatever_happens(toys: Any) -> None:
    run(range(120), toys)


@pytest.mark.slow
def test_the_text_is_the_targets_own_whatever_happens_5000_times(toys: Any) -> None:
    run(range(1000, 6000), toys)
