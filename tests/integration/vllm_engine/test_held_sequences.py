"""How a request of vLLM comes to a prefix, and how verdicts follow from its results."""

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
def test_a_sequence_moves_to_a_prefix(prefix, choosing, move):
    assert held().move(prefix, BLOCK, choosing=choosing) == move
    if prefix == [*TEXT, 20] and choosing:  # a piece of prefill leaves no choice to continue with
        assert held(chosen=None).move(prefix, BLOCK, choosing=True) == (Move.REWRITE, 10)


def work(draft, sampling=Sampling()) -> RequestProgress:  # noqa: B008 (frozen)
    return RequestProgress(StepRequest(1, TEXT, draft, sampling=sampling), held([]))


@pytest.mark.parametrize(
    ("draft", "given", "accepted", "token"),
    [
        ([1, 2, 3], [[1, 2, 9]], 2, 9),  # it ends at the first token that the target does not choose
        ([1, 2, 3], [[1], [2], [3], [4]], 3, 4),  # however vLLM cuts it
    ],
)
def test_a_draft_is_verified(draft, given, accepted, token):
    progress = work(draft)
    for tokens in given:
        assert not progress.done
        progress.take(tokens)
    assert (progress.done, progress.accepted, progress.token) == (True, accepted, token)
    assert (progress.held.tokens, progress.held.chosen) == ([*TEXT, *draft[:accepted]], token)


def test_a_piece_of_prefill_chooses_nothing():
    piece = work([], None)
    piece.take([0])
    assert (piece.done, piece.token, piece.held.tokens, piece.held.chosen) == (True, None, TEXT, None)
