"""The drafter's caches, with a backend whose answers depend on all of its inputs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from moa_runtime.backends.base import StepInputs, StepResult
from moa_runtime.drafters import ngram
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.moa import MoaDrafter
from moa_runtime.drafters.ngram import NgramMixture
from support.drafted import draft_of
from support.refusals import refused
from support.runtime.echo import KV, EchoBackend, fed, rows


def fresh(prefix: list[int], count: int, memory: int, max_context: int = 10_000) -> list[DraftToken]:
    """Return the draft of a drafter without a history."""
    drafter = MoaDrafter(EchoBackend(), max_context=max_context)
    drafter.add_rows(0, *rows(0, memory))
    return draft_of(drafter, prefix, count)


@pytest.fixture
def drafter() -> MoaDrafter:
    return MoaDrafter(EchoBackend(), max_context=10_000)


def test_a_drafter_with_a_history_drafts_as_one_without(drafter: MoaDrafter) -> None:
    """After drafts that were accepted, rejected or dropped, and rows that arrived, were replaced or truncated."""
    rng, text, held = random.Random(0), [5, 6, 7], 0
    for _ in range(300):
        if rng.random() < 0.4:
            start = rng.randint(0, held)
            drafter.add_rows(start, *rows(start, count := rng.randint(1, 4)))
            held = start + count
        if rng.random() < 0.2:
            drafter.truncate_rows(length := rng.randint(0, 30))
            held = min(held, length)
        assert drafter.rows == held
        drafted = draft_of(drafter, text, count := rng.randint(1, 4))
        assert drafted == fresh(text, count, min(held, len(text)))  # rows after the text are not read
        kept = text[: rng.randint(1, len(text))] if rng.random() < 0.3 or len(text) > 60 else text
        text = [*kept, *(token.token for token in drafted[: rng.randint(0, count)]), rng.randint(0, 999)]


def test_an_accepted_draft_costs_no_second_pass(drafter: MoaDrafter) -> None:
    first = [token.token for token in draft_of(drafter, [5, 6, 7], 4)]
    assert fed(drafter) == [3, 1, 1, 1]
    draft_of(drafter, [5, 6, 7, *first, 42], 2)  # all four accepted, and a bonus token
    assert fed(drafter) == [2, 1]  # the last drafted token was never fed
    draft_of(drafter, [5, 6, 7, first[0], 999], 2)
    assert fed(drafter) == [1, 1]
    assert set(drafter._backend.rows) == {1}  # a zero row, for want of others


def test_a_gap_another_shape_or_an_empty_prefix_is_refused(drafter: MoaDrafter) -> None:
    drafter.add_rows(0, *rows(0, 2))
    for start, keys, values in ((3, (1, *KV), (1, *KV)), (2, (1, 3, 4), (1, 3, 4)), (2, (2, *KV), (1, *KV))):
        with pytest.raises(ValueError):
            drafter.add_rows(start, np.zeros(keys, np.float32), np.zeros(values, np.float32))
    with pytest.raises(ValueError):
        drafter.propose([], Budget.chain(0))
    assert drafter.rows == 2


def test_a_backend_of_fixed_size_is_not_asked_for_more() -> None:
    backend = EchoBackend()
    backend.max_positions = 6
    drafter = MoaDrafter(backend, max_context=8)
    assert len(draft_of(drafter, [1] * 5, 10)) == 1
    assert draft_of(drafter, [1] * 7, 10) == []


class _BrokenBackend(EchoBackend):
    """A backend with broken weights."""

    def step(self, inputs: StepInputs) -> StepResult:
        result = super().step(inputs)
        return replace(result, top_logprobs=np.full_like(result.top_logprobs, np.nan))


@pytest.mark.parametrize("budget", [Budget.chain(3), Budget.tree()])
def test_a_backend_that_computes_nan_is_refused(budget: Budget) -> None:
    drafter = MoaDrafter(_BrokenBackend(), max_context=100, mixture=NgramMixture())
    with refused("not_finite"):
        drafter.propose([5, 6, 7], budget)


def written(drafted: list[DraftToken]) -> list[int]:
    return [one.token for one in drafted]


class RankedBackend(EchoBackend):
    """Always the same ranking: the stop token 1 first, then 2, then 3."""

    top_k = 3

    def __init__(self, stop_probability: float) -> None:
        super().__init__()
        self._logprobs = np.log([[stop_probability, 0.2, 0.1]]).astype(np.float32)

    def step(self, inputs: StepInputs) -> StepResult:
        result = super().step(inputs)
        return StepResult(np.array([[1, 2, 3]]), self._logprobs, result.keys, result.values)


@pytest.mark.parametrize(("stop_probability", "expected"), [(0.4, [2, 2]), (0.6, [1])])
def test_an_end_of_turn_is_drafted_only_if_it_is_more_likely_than_not(stop_probability, expected):
    """Nothing follows it."""
    drafter = MoaDrafter(RankedBackend(stop_probability), max_context=100, stop_tokens=[1])
    assert written(draft_of(drafter, [5], 2)) == expected


def test_the_best_candidate_is_drafted_if_all_end_the_turn() -> None:
    drafter = MoaDrafter(RankedBackend(0.3), max_context=100, stop_tokens=[1, 2, 3])
    assert draft_of(drafter, [5], 1)[0].token == 1


def copying(memory: int) -> MoaDrafter:
    """The ranking 1 (0.4), 2 (0.2), 3 (0.1), and copies of the conversation."""
    drafter = MoaDrafter(RankedBackend(0.4), max_context=100, mixture=NgramMixture())
    drafter.add_rows(0, *rows(0, memory))
    return drafter


REPEATED = [50, 51, 52, 53, 54, 55, 50, 51, 52]


def test_a_chain_copies_the_conversation_and_continues_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 52 to 55 and round to 50: tokens that the backend does not know."""
    assert written(draft_of(copying(8), REPEATED, 4)) == [53, 54, 55, 50]
    assert written(draft_of(copying(8), [50, 51, 52], 3)) == [1, 1, 1]
    monkeypatch.setattr(ngram, "REACH", 2)
    assert written(draft_of(copying(8), REPEATED, 4)) == [53, 54, 1, 1]


def test_a_chain_is_the_same_token_by_token() -> None:
    """As during an outage: each draft continues the text so far."""
    drafter, text = copying(8), list(REPEATED)
    for _ in range(6):
        text += written(draft_of(drafter, text, 1))
    assert text[len(REPEATED) :] == written(draft_of(copying(8), REPEATED, 6))


def test_a_sure_copy_takes_no_step() -> None:
    """Sixteen tokens match, and the three that followed them; then come tokens that did not occur."""
    text = [*range(1, 20), *range(1, 17)]
    drafter = MoaDrafter(EchoBackend(), max_context=10_000, mixture=NgramMixture())
    drafter.add_rows(0, *rows(0, len(text) - 1))
    assert [token.token for token in draft_of(drafter, text, 3)] == [17, 18, 19]
    assert fed(drafter) == []
    assert draft_of(drafter, text, 2) == draft_of(drafter, text, 2)
    draft_of(drafter, [*text, 17, 99], 2)
    assert fed(drafter) == [len(text) + 2, 1]  # what was copied is fed with the first token that needs a step
