"""Modules that are imported when a test first uses them."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """A module, or a member of one, whose import takes seconds: each process of pytest-xdist collects all tests.

    Args:
        member: name of a class in the module whose attributes are meant.
    """

    def __init__(self, module: str, member: str = "") -> None:
        self._module, self._member = module, member

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks every object of a test module for its own marks
            raise AttributeError(name)
        found = importlib.import_module(self._module)
        return getattr(getattr(found, self._member) if self._member else found, name)
