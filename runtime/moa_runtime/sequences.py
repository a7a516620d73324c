"""Helpers on token lists and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many leading items two sequences share: ``common_length("tea", "ten")`` is 2."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
