"""What is asked of vLLM for a prefix, and how verdicts follow from what it gives back."""

from __future__ import annotations

import pytest

from moa_runtime.session.events import Sampling
from moa_server.engine.base import StepRequest
from moa_server.engine.vllm.engine import HeldSequence, Move, RequestProgress

BLOCK = 4
TEXT = list(range(10, 20))  # two blocks and a half


def held(tokens=TEXT, chosen=20) -> HeldSequence:
    return HeldSequence("r", list(tokens), chosen)


@pytest.mark.parametrize(
    ("prefix", "choosing", "move"),
    [
        ([*TEXT, 20], True, (Move.GO_ON, 10)),
        (TEXT, False, (Move.NOTHING, 10)),
        (TEXT[:3], False, (Move.NOTHING, 10)),  # nothing is dropped
        ([*TEXT, 20], False, (Move.GO_ON, 10)),
        ([*TEXT, 20, 21], True, (Move.REWRITE, 10)),
        ([*TEXT, 7], True, (Move.REWRITE, 10)),
        (TEXT, True, (Move.REWRITE, 9)),  # its last token is processed again, for its choice
        ([*TEXT[:8], 7], True, (Move.REWRITE, 8)),
        (TEXT[:8], True, (Move.ANEW, 0)),  # token 7 lies in a block that is full
        ([*TEXT[:7], 7], True, (Move.ANEW, 0)),
        ([7], True, (Move.ANEW, 0)),
    ],
)
def test_what_is_to_be_done_for_a_prefix(prefix, choosing, move):
    assert held().move(prefix, BLOCK, choosing=choosing) == move


def test_a_piece_of_prefill_leaves_no_choice_to_go_on_with():
    assert held(chosen=None).move([*TEXT, 20], BLOCK, choosing=True) == (Move.REWRITE, 10)


def work(draft, sampling=Sampling()) -> RequestProgress:  # noqa: B008 (frozen)
    return RequestProgress(StepRequest(1, TEXT, draft, sampling=sampling), held([]))


def test_a_draft_ends_at_the_first_token_that_the_target_does_not_choose():
    wrong = work([1, 2, 3])
    wrong.take([1, 2, 9])
    assert (wrong.done, wrong.accepted, wrong.token, wrong.processed) == (True, 2, 9, [*TEXT, 1, 2])
    assert (wrong.held.tokens, wrong.held.chosen) == ([*TEXT, 1, 2], 9)


def test_a_verdict_does_not_depend_on_how_vllm_cuts_the_draft():
    cut = work([1, 2, 3])
    for given in ([1], [2], [3]):  # the prefix alone, then one token of the draft, then the others
        cut.take(given)
        assert not cut.done
    assert cut.draft == []
    cut.take([4])
    assert (cut.done, cut.accepted, cut.token) == (True, 3, 4)


def test_a_piece_of_prefill_chooses_nothing():
    piece = work([], None)
    piece.take([0])
    assert (piece.done, piece.token, piece.held.tokens, piece.held.chosen) == (True, None, TEXT, None)
