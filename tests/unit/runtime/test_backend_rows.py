"""Memory rows of a backend, and the caches of its drafter."""

from __future__ import annotations

import numpy as np
import pytest

from moa_runtime.drafters.moa import MoaDrafter
from support.drafted import draft_of
from support.runtime.echo import EchoBackend, fed, rows


class OwnRowsBackend(EchoBackend):
    """Rows of a shape of their own, of which cache entries are made; a step can do without any."""

    row_shape, needs_a_row, entries_from_rows = (1, 3), False, True


def own_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((count, 1, 3), np.float32), np.ones((count, 1, 3), np.float32)


def test_rows_need_not_have_the_shape_of_cache_entries() -> None:
    drafter = MoaDrafter(OwnRowsBackend(), max_context=100)
    drafter.add_rows(0, *own_rows(2))
    draft_of(drafter, [5, 6, 7], 1)
    assert drafter._backend.rows == [2]
    with pytest.raises(ValueError, match="expected"):
        drafter.add_rows(2, *rows(2, 1))


def test_a_backend_that_needs_no_row_is_given_none() -> None:
    drafter = MoaDrafter(OwnRowsBackend(), max_context=100)
    draft_of(drafter, [5], 2)
    assert drafter._backend.rows == [0, 0]


@pytest.mark.parametrize(("backend", "expected"), [(EchoBackend(), 1), (OwnRowsBackend(), 5)])
def test_tokens_that_have_a_row_now_are_fed_again_only_where_entries_are_made_of_rows(backend, expected):
    drafter, prefix = MoaDrafter(backend, max_context=100), list(range(8))
    before, later = (np.ones((count, *backend.row_shape), np.float32) for count in (3, 4))
    drafter.add_rows(0, before, before)
    draft_of(drafter, prefix, 1)
    drafter.add_rows(3, later, later)
    fed(drafter)
    draft_of(drafter, prefix, 1)
    assert fed(drafter) == [expected]


def test_a_look_back_leaves_no_entry_that_lacks_its_rows() -> None:
    drafter, prefix = MoaDrafter(OwnRowsBackend(), max_context=100), list(range(8))
    drafter.add_rows(0, *own_rows(7))
    longer = [*prefix[:4], *(token.token for token in draft_of(drafter, prefix[:4], 4))]  # with four rows
    fed(drafter)
    draft_of(drafter, longer, 1)  # with all seven
    assert fed(drafter) == [4]
