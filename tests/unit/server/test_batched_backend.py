"""Steps of several threads as one: who waits for whom, and who for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moa_runtime.backends.base import StepInputs, StepResult
from moa_server.drafting.batcher import BatchedBackend

PATIENCE_S = 60  # what would wait for ever fails after it
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


def of(token: int) -> StepInputs:
    nothing = np.zeros((0, 1, 2), np.float32)
    return StepInputs.chain([token], (nothing, nothing), (nothing, nothing))


@pytest.fixture
def half() -> Half:
    return Half()


@pytest.fixture
def backend(half):
    backend = BatchedBackend(half.steps, top_k=1, kv_shape=(1, 2))
    yield backend
    backend.close()


def together(backend: BatchedBackend, *drafts: Callable[[], None]) -> None:
    """Run each in a thread; none begins before all of them are drafting."""
    ready = threading.Barrier(len(drafts))

    def run(draft: Callable[[], None]) -> None:
        with backend.drafting():
            ready.wait(PATIENCE_S)
            draft()

    threads = [threading.Thread(target=run, args=(draft,), daemon=True) for draft in drafts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_steps_of_all_that_draft_are_one(backend, half):
    heard: dict[int, list[int]] = {number: [] for number in range(4)}

    def draft(number: int) -> None:
        for step in range(3):
            result = backend.step(of(100 * number + step))
            heard[number].append(int(result.top_tokens[0, 0]))

    together(backend, *(lambda number=number: draft(number) for number in heard))
    assert [sorted(batch) for batch in half.batches] == [[step + 100 * n for n in range(4)] for step in range(3)]
    assert heard == {number: [100 * number + step for step in range(3)] for number in range(4)}


def test_who_ends_sooner_or_never_steps_holds_nobody_up(backend, half):
    counts = [5, 1, 0, 3]

    def draft(count: int) -> None:
        for step in range(count):
            backend.step(of(step))

    together(backend, *(lambda count=count: draft(count) for count in counts))
    assert sum(map(len, half.batches)) == sum(counts)
    assert len(half.batches) <= sum(counts)


def test_who_raises_holds_nobody_up(backend):
    done = []

    def fail() -> None:
        with pytest.raises(ValueError), backend.drafting():
            raise ValueError("a drafter's mistake")
        done.append("failed")

    def draft() -> None:
        for step in range(3):
            backend.step(of(step))
        done.append("drafted")

    together(backend, draft, fail, draft)
    assert sorted(done) == ["drafted", "drafted", "failed"]


def test_a_step_that_cannot_be_done_harms_no_other(backend):
    heard = []

    def good(token: int) -> None:
        heard.append(int(backend.step(of(token)).top_tokens[0, 0]))

    def bad() -> None:
        with pytest.raises(RuntimeError, match="thirteen"):
            backend.step(of(BROKEN))
        heard.append(int(backend.step(of(3)).top_tokens[0, 0]))

    together(backend, lambda: good(1), bad, lambda: good(2))
    assert sorted(heard) == [1, 2, 3]
