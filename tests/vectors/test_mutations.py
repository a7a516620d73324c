"""The vectors find mistakes."""

from __future__ import annotations

import pytest

from vectors.mutations import MUTATIONS, Mutation, broken_by


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.module}: {mutation.new.strip()}")
def test_every_mistake_breaks_a_vector(mutation: Mutation) -> None:
    assert broken_by(mutation)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["session/state", "rounds"])
def test_what_is_no_mistake_breaks_none(module: str) -> None:
    assert not broken_by(Mutation(module, "from __future__", "from  __future__"))
