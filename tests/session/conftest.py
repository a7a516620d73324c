"""All sessions of these tests stay within the tables of both ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from session.in_table import watching


@pytest.fixture(scope="module", autouse=True)
def _watched() -> Iterator[None]:
    with watching():
        yield
