"""Steps of several drafting threads run as one: which of them wait, and for which others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.drafting.batcher import BatchedBackend

PATIENCE_S = 60  # a thread that waits for ever fails after it
BROKEN = 13


class Half:
    """Answers each step with its first token, and refuses one of them."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def steps(self, inputs: Sequence[StepInputs]) -> list[StepResult]:
        tokens = [int(each.tokens[0]) for each in inputs]
        self.batches.append(tokens)
        if BROKEN in tokens:
            raise RuntimeError("no step over thirteen")
        nothing = np.zeros((1, 1, 2), np.float32)
        return [StepResult(np.array([[token]]), np.zeros((1, 1), np.float32), nothing, nothing) for token in tokens]


@pytest.fixture
def step():
    """A function that runs one step and returns its token."""
    half = Half()
    backend = BatchedBackend(half.steps, top_k=1, kv_shape=(1, 2))

    def stepping(token: int) -> int:
        nothing = np.zeros((0, 1, 2), np.float32)
        inputs = StepInputs.chain([token], (nothing, nothing), (nothing, nothing))
        return int(backend.step(inputs).top_tokens[0, 0])

    stepping.drafting, stepping.batches = backend.drafting, half.batches
    yield stepping
    backend.close()


def together(step, *drafts: Callable[[], None]) -> None:
    """Run each in a thread; none begins before all of them are drafting."""
    ready = threading.Barrier(len(drafts))

    def run(draft: Callable[[], None]) -> None:
        with step.drafting():
            ready.wait(PATIENCE_S)
            draft()

    threads = [threading.Thread(target=run, args=(draft,), daemon=True) for draft in drafts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_steps_of_all_drafts_are_one(step):
    heard: dict[int, list[int]] = {number: [] for number in range(4)}

    def draft(number: int) -> None:
        heard[number] += [step(100 * number + index) for index in range(3)]

    together(step, *(lambda number=number: draft(number) for number in heard))
    assert [sorted(batch) for batch in step.batches] == [[index + 100 * n for n in range(4)] for index in range(3)]
    assert heard == {number: [100 * number + index for index in range(3)] for number in range(4)}


def test_a_draft_that_ends_sooner_or_fails_holds_no_other_up(step):
    counts = [5, 1, 0, 3]

    def fail() -> None:
        with pytest.raises(ValueError), step.drafting():
            raise ValueError("a drafter's mistake")

    together(step, fail, *(lambda count=count: [step(index) for index in range(count)] for count in counts))
    assert sum(map(len, step.batches)) == sum(counts) >= len(step.batches)


def test_a_failing_step_harms_no_other(step):
    heard = []

    def bad() -> None:
        with pytest.raises(RuntimeError, match="thirteen"):
            step(BROKEN)
        heard.append(step(3))

    together(step, lambda: heard.append(step(1)), bad, lambda: heard.append(step(2)))
    assert sorted(heard) == [1, 2, 3]
