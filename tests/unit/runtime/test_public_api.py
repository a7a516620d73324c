"""The names that ``moa_runtime`` exports."""

from __future__ import annotations

import pytest

import moa_runtime


def test_every_public_name_is_there() -> None:
    for name in moa_runtime.__all__:
        assert getattr(moa_runtime, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chap'"):
        _ = moa_runtime.Chap  # type: ignore[attr-defined]
