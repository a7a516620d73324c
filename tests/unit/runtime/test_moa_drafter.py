"""The drafter's caches, with a backend whose answers depend on all of its inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moa_runtime.backends.base import StepInputs, StepResult
from moa_runtime.drafters import moa, ngram
from moa_runtime.drafters.base import Budget, DraftToken
from moa_runtime.drafters.moa import GrowingRows, MoaDrafter
from moa_runtime.drafters.ngram import WORTH_COPYING, NgramMixture
from moa_runtime.session.tree import DraftTree
from support.drafted import draft_of, tokens_of
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


def test_the_whole_prefix_is_fed_once_then_token_by_token(drafter: MoaDrafter) -> None:
    drafter.add_rows(0, *rows(0, 4))
    assert draft_of(drafter, [5, 6, 7, 8, 9], 4) == fresh([5, 6, 7, 8, 9], 4, 4)
    assert fed(drafter) == [5, 1, 1, 1]


def test_an_accepted_draft_costs_no_second_pass(drafter: MoaDrafter) -> None:
    first = [token.token for token in draft_of(drafter, [5, 6, 7], 4)]
    fed(drafter)
    longer = [5, 6, 7, *first, 42]  # all four accepted, and a bonus token
    assert draft_of(drafter, longer, 2) == fresh(longer, 2, 0)
    assert fed(drafter) == [2, 1]  # the last drafted token was never fed


def test_a_rejected_draft_is_dropped(drafter: MoaDrafter) -> None:
    first = [token.token for token in draft_of(drafter, [5, 6, 7], 4)]
    fed(drafter)
    corrected = [5, 6, 7, first[0], 999]
    assert draft_of(drafter, corrected, 2) == fresh(corrected, 2, 0)
    assert fed(drafter) == [1, 1]


def test_text_drafted_ahead_can_be_dropped_again(drafter: MoaDrafter) -> None:
    prefix = [5, 6, 7]
    first = [token.token for token in draft_of(drafter, prefix, 3)]
    assert draft_of(drafter, [*prefix, *first], 3) == fresh([*prefix, *first], 3, 0)
    assert draft_of(drafter, prefix, 3) == fresh(prefix, 3, 0)
    assert draft_of(drafter, [1], 1) == fresh([1], 1, 0)


def test_new_rows_count_at_once_for_cached_tokens(drafter: MoaDrafter) -> None:
    before = draft_of(drafter, [5, 6, 7, 8], 3)
    drafter.add_rows(0, *rows(0, 3))
    fed(drafter)
    assert draft_of(drafter, [5, 6, 7, 8], 3) == fresh([5, 6, 7, 8], 3, 3) != before
    assert fed(drafter) == [1, 1, 1]


def test_rows_after_the_prefix_are_not_read(drafter: MoaDrafter) -> None:
    drafter.add_rows(0, *rows(0, 9))
    assert draft_of(drafter, [5, 6, 7], 2) == fresh([5, 6, 7], 2, 3)


def test_without_rows_one_zero_row_is_fed(drafter: MoaDrafter) -> None:
    draft_of(drafter, [5], 2)
    assert drafter._backend.rows == [1, 1]
    assert drafter.rows == 0


def test_rows_are_replaced_and_truncated(drafter: MoaDrafter) -> None:
    drafter.add_rows(0, *rows(100, 6))
    drafter.add_rows(2, *rows(2, 3))
    assert drafter.rows == 5
    drafter.add_rows(0, *rows(0, 2))
    assert drafter.rows == 2  # later rows belong to dropped tokens
    drafter.add_rows(2, *rows(2, 3))
    drafter.truncate_rows(4)
    assert drafter.rows == 4
    drafter.truncate_rows(99)
    assert drafter.rows == 4
    prefix = list(range(9))
    assert draft_of(drafter, prefix, 2) == fresh(prefix, 2, 4)


def test_a_gap_or_another_shape_is_refused(drafter: MoaDrafter) -> None:
    drafter.add_rows(0, *rows(0, 2))
    with pytest.raises(ValueError, match="start at position 3, but only 2 are held"):
        drafter.add_rows(3, *rows(3, 1))
    with pytest.raises(ValueError, match="expected"):
        drafter.add_rows(2, np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 4), np.float32))
    with pytest.raises(ValueError, match="expected"):
        drafter.add_rows(2, np.zeros((2, *KV), np.float32), np.zeros((1, *KV), np.float32))
    assert drafter.rows == 2


def test_a_long_catch_up_goes_in_chunks(drafter: MoaDrafter) -> None:
    prefix = [token % 1000 for token in range(2 * moa.CATCH_UP_TOKENS + 5)]
    drafter.add_rows(0, *rows(0, len(prefix) - 1))
    assert draft_of(drafter, prefix, 2)[0].token != draft_of(drafter, prefix[:-1], 1)[0].token
    assert drafter._backend.rows[:4] == [512, 1024, 1028, 1028]
    assert fed(drafter)[:4] == [512, 512, 5, 1]


def test_the_context_is_never_exceeded() -> None:
    drafter = MoaDrafter(EchoBackend(), max_context=8)
    assert len(draft_of(drafter, [1] * 5, 10)) == 3
    assert len(draft_of(drafter, [1] * 7, 10)) == 1
    assert draft_of(drafter, [1] * 8, 10) == []
    assert draft_of(drafter, [1] * 9, 10) == []
    assert draft_of(drafter, [1], 0) == []


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


def test_growing_rows_keep_what_they_hold() -> None:
    held = GrowingRows(KV)
    for start in range(0, 1000, 7):
        held.write(start, *rows(start, 7))
    keys, values = held.first(held.length)
    assert keys[:, 0, 0].tolist() == list(range(1001))
    assert (values - keys == 0.5).all()


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
def test_an_end_of_turn_is_drafted_only_if_it_is_more_likely_than_not(
    stop_probability: float, expected: list[int]
) -> None:
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


def test_tentative_text_is_not_copied() -> None:
    """55 is confirmed, or only drafted."""
    text = [50, 51, 52, 53, 54, 55, 51, 52, 53, 54]
    for tentative, follows in ((4, 55), (5, 1)):
        tree = copying(5).propose(text, Budget(nodes=1, levels=1, tentative=tentative))
        assert written(tokens_of(tree)) == [follows]


def test_a_drafter_without_rows_copies() -> None:
    assert written(draft_of(copying(0), REPEATED, 2)) == [53, 54]


def echoing(text: list[int], max_context: int = 10_000) -> MoaDrafter:
    drafter = MoaDrafter(EchoBackend(), max_context=max_context, mixture=NgramMixture())
    drafter.add_rows(0, *rows(0, len(text) - 1))
    return drafter


def test_a_sure_copy_takes_no_step() -> None:
    """Sixteen tokens match, and the three that followed them; then come tokens that did not occur."""
    text = [*range(1, 20), *range(1, 17)]
    drafter = echoing(text)
    assert [token.token for token in draft_of(drafter, text, 3)] == [17, 18, 19]
    assert fed(drafter) == []
    assert draft_of(drafter, text, 2) == draft_of(drafter, text, 2)
    draft_of(drafter, [*text, 17, 99], 2)
    assert fed(drafter) == [len(text) + 2, 1]  # what was copied is fed with the first token that needs a step


def test_a_chain_is_lengthened_by_likely_copies() -> None:
    """As long as draft and copies together, and what stood before them, are as likely as :data:`WORTH_COPYING`."""
    text = [*range(1, 60), *range(1, 6)]
    drafter = echoing(text)
    lengths = []
    for before in (0.0, math.log(0.5), math.log(WORTH_COPYING)):
        for levels in (0, 1):
            fed(drafter)
            tree = drafter.propose(text, replace(Budget.chain(levels), logprob=before))
            assert list(tree.tokens) == list(range(6, 6 + len(tree.tokens))) and tree.depth == len(tree.tokens)
            assert len(tree.tokens) <= levels or before + tree.scores[-1] >= math.log(WORTH_COPYING)
            assert len(fed(drafter)) == len(tree.steps) == levels
            lengths.append(len(tree.tokens))
    assert lengths[0] > lengths[2] > lengths[4] == 0
    assert lengths[1] > lengths[3] > lengths[5] == 1  # the level that was asked for


def test_copies_alone_take_no_step() -> None:
    """Nor with branches: a chain of them."""
    text = [*range(1, 60), *range(1, 6)]
    drafter = echoing(text)
    chain, tree = (drafter.propose(text, shape) for shape in (Budget.chain(0), Budget.tree(nodes=1024, levels=0)))
    assert chain == tree and len(chain.tokens) > 3 and chain.steps == () and fed(drafter) == []
    assert drafter.propose([*text, 99], Budget.chain(0)) == DraftTree()


def test_copies_stay_within_context_depth_nodes_and_turn_and_need_a_mixture() -> None:
    text = [*range(1, 60), *range(1, 6)]
    assert len(echoing(text, max_context=len(text) + 2).propose(text, Budget.chain(0)).tokens) == 2
    assert echoing(text, max_context=len(text)).propose(text, Budget.chain(0)) == DraftTree()
    assert len(echoing(text).propose(text, replace(Budget.chain(0), depth=3)).tokens) == 3
    assert len(echoing(text).propose(text, Budget.chain(1, nodes=2)).tokens) == 2
    assert echoing(text).propose(text, Budget.chain(1, nodes=0)) == DraftTree()
    ending = MoaDrafter(RankedBackend(0.6), max_context=100, stop_tokens=[1], mixture=NgramMixture())
    ending.add_rows(0, *rows(0, 4))
    assert written(tokens_of(ending.propose([1, 7, 7, 7, 8], Budget.chain(3)))) == [1]
    alone = MoaDrafter(EchoBackend(), max_context=10_000)
    alone.add_rows(0, *rows(0, len(text) - 1))
    assert alone.propose(text, Budget.chain(0)) == DraftTree() and len(alone.propose(text, Budget.chain(2)).tokens) == 2
    with pytest.raises(ValueError, match="empty prefix"):
        alone.propose([], Budget.chain(0))
