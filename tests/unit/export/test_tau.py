"""Tau by replay, against rounds counted by hand."""

from __future__ import annotations

import numpy as np

from moa_export.recordings import Recording
from moa_export.validation import replay
from moa_runtime.backends.base import Backend, StepInputs, StepResult

TEXT = [5, 1, 2, 3, 4, 5, 6, 7, 8, 9]
PROMPT = 3


class Successor(Backend):
    """Drafts token + 1, and the wrong thing after some tokens. Counts on its rows being those before the draft."""

    top_k, kv_shape, max_positions = 1, (1, 1), None

    def __init__(self, wrong_after: set[int]) -> None:
        self.wrong_after = wrong_after
        self.rows_seen: list[int] = []

    def step(self, inputs: StepInputs) -> StepResult:
        self.rows_seen.append(len(inputs.memory_keys))
        last = int(inputs.tokens[-1])
        guess = 99 if last in self.wrong_after else last + 1
        entries = np.zeros((len(inputs.tokens), 1, 1), np.float32)
        return StepResult(np.array([[guess]]), np.array([[-0.1]], np.float32), entries, entries)


def recording() -> Recording:
    rows = np.zeros((len(TEXT), 1, 1), np.float32)
    return Recording(TEXT, PROMPT, rows, rows)


def test_whole_drafts_are_accepted_with_a_bonus_token() -> None:
    # Position 3 (token 3) comes with the prompt's verdict; six remain: drafts of 2 commit 3 and 3.
    tau = replay(Successor(set()), [recording()], draft_length=2)
    assert (tau.rounds, tau.tokens, tau.value) == (2, 6, 3.0)


def test_a_wrong_token_ends_the_round_with_the_target_s_own() -> None:
    # From 3: drafts 4 and 5 (wrong after 5): commits 4, 5, 6. From 6: 7, 8: commits 7, 8, 9.
    # Wrong after 3 as well: the first round commits 4 alone; from 4: 5, then wrong: 5, 6; from 6: 7, 8, 9.
    tau = replay(Successor({3, 5}), [recording()], draft_length=3)
    assert (tau.rounds, tau.tokens) == (3, 6)


def test_a_draft_sees_the_rows_of_all_committed_tokens_but_the_last() -> None:
    backend = Successor({3, 4, 5, 6, 7, 8})
    replay(backend, [recording()], draft_length=1)
    assert backend.rows_seen == [3, 4, 5, 6, 7, 8]


def test_rounds_of_several_conversations_are_counted_together_and_each_is_announced() -> None:
    calls: list[int] = []
    tau = replay(Successor(set()), [recording()] * 3, draft_length=2, on_conversation=lambda: calls.append(1))
    assert (tau.rounds, tau.tokens, len(calls)) == (6, 18, 3)
