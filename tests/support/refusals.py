"""Errors by their code: tests check codes, and the sentences stand in ``tests/golden`` alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from moa_runtime.errors import MoaError


@contextlib.contextmanager
def refused(code: str, error: type[MoaError] = MoaError, *named: str) -> Iterator[pytest.ExceptionInfo[MoaError]]:
    """Expect an error of this code, as ``pytest.raises`` does, in whose sentence the values ``named`` stand."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"[{caught.value.code}] {caught.value}"
    assert all(value in str(caught.value) for value in named), caught.value
