"""Shadow drafts, compared with the text that the server streams."""

from __future__ import annotations

from moa_runtime.drafting.in_flight import ShadowDraft
from moa_runtime.session.tree import DraftTree

TREE = DraftTree((5, 6, 7, 8), (0, 0, 1, 3), (-0.1, -0.2, -0.3, -0.4), (2, 1))  # 5-7-8 and 6
PREFIX = [1, 2]


def compared(*committed: int) -> int | None:
    """Accepted tokens."""
    shadow = ShadowDraft()
    shadow.begin(2, TREE, 0.25)
    found = shadow.compare([*PREFIX, *committed], 0.5, 0.125, 3)
    assert shadow.pending == (found is None)
    if found is not None:
        assert (found.drafted, found.depth, found.draft_s, found.compute_s) == (4, 3, 0.25, None)
        assert found.sharing == 3
        assert found.waited_s == 0.5 + 4 * 0.125  # the target's pass is over the draft too
    return None if found is None else found.accepted


def test_it_is_decided_as_soon_as_the_text_leaves_the_draft():
    assert compared() is None and compared(5) is None and compared(5, 7, 8) is None
    assert compared(9) == 0
    assert compared(6, 5) == 1
    assert compared(5, 7, 9) == 2
    assert compared(5, 7, 8, 9) == 3


def test_a_forgotten_draft_is_not_compared():
    shadow = ShadowDraft()
    shadow.begin(2, TREE, 0.25)
    shadow.forget()
    assert not shadow.pending and shadow.compare([*PREFIX, 9], 0.0, 0.0, 1) is None


def test_an_empty_draft_is_a_round_of_one_token():
    shadow = ShadowDraft()
    shadow.begin(2, DraftTree(), 0.0)
    found = shadow.compare([*PREFIX, 9], 0.5, 0.0, 1)
    assert found is not None and (found.accepted, found.depth) == (0, 0)
